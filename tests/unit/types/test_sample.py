import attrs

from cosmos_core.types import Group, Sample, SampleStatus


def sample(**changes: object) -> Sample:
    base = Sample(
        index=0,
        status=SampleStatus.OK,
        reward=1.0,
        rewards={"math": 1.0},
        oldest_version=3,
        newest_version=4,
        num_units=7,
        num_prompt_units=5,
    )
    return attrs.evolve(base, **changes)  # type: ignore[arg-type]


def test_only_scored_samples_with_a_number_have_a_reward_that_counts() -> None:
    scored = {status for status in SampleStatus if sample(status=status).is_scored}
    assert scored == {SampleStatus.OK, SampleStatus.TRUNCATED}
    assert not sample(reward=None).is_scored


def test_a_group_is_as_old_as_its_oldest_unit() -> None:
    group = Group(position=9, samples=(sample(oldest_version=5), sample(oldest_version=2)))
    assert group.oldest_version == 2
    assert group.num_units == 14
