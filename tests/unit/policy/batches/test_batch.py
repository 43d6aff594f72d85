import random

import attrs
import pytest

from cosmos_core.errors import DataError
from cosmos_core.policy.batches.batch import (
    Counts,
    MissingPayloadsError,
    Units,
    Wanted,
    balanced,
    counts_of,
    group_of,
    needed,
    requests,
    rollout_sequences,
    temperatures,
    units_of,
    wanted_samples,
)
from cosmos_core.transport.directives import GroupRef
from cosmos_core.types import Array, Payload, Sample, SampleStatus
from cosmos_core.types.payload import ITEM_SIZES


def sample(index, reward, *, units=2, status="ok"):
    return Sample(
        index=index,
        status=SampleStatus(status),
        reward=reward,
        rewards={"r": reward or 0.0},
        oldest_version=3,
        newest_version=4,
        num_units=units,
        num_prompt_units=5,
    )


def group(lease, *rewards, endpoint="tcp://a:1"):
    samples = tuple(
        sample(i, reward, status="reward_failed" if reward is None else "ok") for i, reward in enumerate(rewards)
    )
    return GroupRef(position=lease * 10, row=lease, lease=lease, endpoint=endpoint, samples=samples)


def test_the_group_that_algorithms_see():
    seen = group_of(group(3, 0.5, None))
    assert (seen.position, seen.num_units, seen.oldest_version) == (30, 4, 3)
    assert [s.is_scored for s in seen.samples] == [True, False]
    assert seen.samples[0].reward == 0.5


def test_the_temperatures_of_a_batch_are_the_same_for_everyone():
    plain, cold, hot = (group(lease, 1.0) for lease in (1, 2, 3))
    cold = attrs.evolve(cold, settings={"rollout.sampling.temperature": 0.5, "policy.optimizer.lr": 0.1})
    hot = attrs.evolve(hot, settings={"rollout.sampling.temperature": 2})
    assert temperatures([hot, plain, cold, cold]) == (None, 0.5, 2.0)
    assert temperatures([hot, cold]) == (0.5, 2.0)
    assert temperatures([plain]) == temperatures([]) == (None,)


def test_advantages_are_of_the_whole_batch_and_unscored_samples_take_no_part(kit):
    groups = [group(1, 1.0, None), group(2, 0.0, 3.0)]
    asked = []

    @attrs.frozen
    class Spy(kit.Reinforce):
        def advantages(self, groups):
            asked.append([g.position for g in groups])
            return super().advantages(groups)

    wanted = wanted_samples(Spy(), groups, (1,))
    assert asked == [[10, 20]]
    found = [(item.group.lease, item.index, item.place, item.advantage) for item in wanted]
    assert found == [(2, 0, 2, 0.0), (2, 1, 3, 3.0)]
    assert [item.place for item in wanted_samples(Spy(), groups, (0,))] == [0]


def test_zero_advantages_are_fetched_only_where_they_have_a_gradient(kit):
    wanted = wanted_samples(kit.Reinforce(), [group(1, 0.0, 0.0), group(2, 0.0, 3.0)], (0, 1))
    assert [item.group.lease for item in needed(kit.Reinforce(), wanted)] == [2]
    assert len(needed(kit.Reinforce(skips_zero_advantage=False), wanted)) == 4


def test_each_lease_is_asked_for_once_where_it_is(kit):
    groups = [group(1, 1.0, 2.0), group(2, 1.0, endpoint="tcp://b:1"), group(3, 1.0)]
    wanted = wanted_samples(kit.Reinforce(), groups, (0, 1, 2))
    assert requests(wanted) == {"tcp://a:1": [1, 3], "tcp://b:1": [2]}


def test_what_is_skipped_still_counts(kit):
    wanted = wanted_samples(kit.Reinforce(), [group(1, 0.0, 2.0)], (0,))
    trained = needed(kit.Reinforce(), wanted)
    held = [kit.payload([1], [2, 3]), kit.payload([4], [5, 6])]
    assert counts_of(wanted, trained) == Counts(sequences=2, decisions=4, prompt_units=10, trained=1)
    assert [sequence.payload for sequence in rollout_sequences(trained, {1: held})] == [held[1]]


def test_what_is_not_as_reported_is_missing(kit):
    for problem in ["absent", "too few", "other length", "no log-probs"]:
        wanted = wanted_samples(kit.Reinforce(), [group(1, 1.0), group(2, 1.0, 2.0)], (0, 1))
        good, short = kit.payload([1], [2, 3]), kit.payload([1], [2])
        payloads = {1: [good], 2: [good, good]}
        match problem:
            case "absent":
                del payloads[2]
            case "too few":
                payloads[2] = [good]
            case "other length":
                payloads[2] = [good, short]
            case "no log-probs":
                del good.arrays["logprobs"]
                payloads[1] = [kit.payload([1], [2, 3])]
        with pytest.raises(MissingPayloadsError) as caught:
            rollout_sequences(wanted, payloads)
        assert caught.value.leases == (2,)


def test_counts_add():
    assert Counts(sequences=1, decisions=2, prompt_units=3, trained=4) + Counts(decisions=1) == Counts(
        sequences=1, decisions=3, prompt_units=3, trained=4
    )


def dialogue(decided, *, num_units=2, recorded=2):
    """A sample with what was recorded of it, and which of its three units it says were decided."""
    arrays = {
        "prompt": Array(dtype="int32", shape=(1,), data=bytes(4)),
        "completion": Array(dtype="int32", shape=(3,), data=bytes(12)),
        "logprobs": Array(dtype="float32", shape=(recorded,), data=bytes(4 * recorded)),
        "versions": Array(dtype="int32", shape=(recorded,), data=bytes(4 * recorded)),
        "decided": Array(dtype="bool", shape=(len(decided),), data=bytes(decided)),
    }
    reference = group(1, 1.0)
    reference = attrs.evolve(reference, samples=(attrs.evolve(reference.samples[0], num_units=num_units),))
    return [Wanted(group=reference, index=0, place=0, advantage=1.0)], {1: [Payload(kind="tokens", arrays=arrays)]}


def test_a_dialogue_has_one_recorded_value_for_each_decision():
    wanted, held = dialogue([1, 0, 1])
    assert [sequence.payload for sequence in rollout_sequences(wanted, held)] == held[1]


def test_a_dialogue_that_is_not_as_reported_is_missing():
    for problem in [
        {"decided": [1, 1, 1]},
        {"decided": [1, 1]},
        {"decided": [1, 0, 1], "recorded": 3},
        {"decided": [1, 0, 1], "num_units": 3, "recorded": 3},
    ]:
        with pytest.raises(MissingPayloadsError):
            rollout_sequences(*dialogue(**problem))


def latents(*, times=2, logprobs=2, versions=2, turns=None, turn_rewards=None):
    """A sample of two denoising steps, with what was recorded of them."""
    reference = attrs.evolve(group(1, 1.0), samples=(sample(0, 1.0, units=2),))
    shapes = {"times": ("float32", times), "logprobs": ("float32", logprobs), "versions": ("int32", versions)}
    shapes |= {"turns": ("int32", turns), "turn_rewards": ("float64", turn_rewards)}
    arrays = {
        name: Array(dtype=dtype, shape=(number,), data=bytes(ITEM_SIZES[dtype] * number))
        for name, (dtype, number) in shapes.items()
        if number is not None
    }
    return [Wanted(group=reference, index=0, place=0, advantage=1.0)], {1: [Payload(kind="latents", arrays=arrays)]}


def test_latents_have_one_recorded_value_for_each_step():
    assert len(rollout_sequences(*latents())) == 1


def test_latents_that_are_not_as_reported_are_missing():
    turns = {"turns": 2, "turn_rewards": 2}
    for problem in [{"times": 3}, {"times": None}, {"logprobs": 3}, {"versions": None}, turns, {"turns": 2}]:
        with pytest.raises(MissingPayloadsError, match="gone or not as reported"):
            rollout_sequences(*latents(**problem))


def test_a_payload_of_a_kind_that_nobody_trains_on_is_missing():
    wanted, held = latents()
    held[1] = [attrs.evolve(held[1][0], kind="media")]
    with pytest.raises(MissingPayloadsError):
        rollout_sequences(wanted, held)


def payload(kind, **shapes):
    arrays = {name: Array(dtype="int32", shape=shape, data=bytes(4 * shape[0])) for name, shape in shapes.items()}
    return Payload(kind=kind, arrays=arrays)


def test_tokens_are_prompt_and_completion():
    found = units_of(payload("tokens", prompt=(3,), completion=(5,)))
    assert found == Units(decisions=5, conditioning=3)
    assert found.total == 8


def test_what_others_said_is_no_decision():
    dialogue = payload("tokens", prompt=(3,), completion=(5,))
    dialogue.arrays["decided"] = Array(dtype="bool", shape=(5,), data=bytes([1, 1, 0, 0, 1]))
    assert units_of(dialogue) == Units(decisions=3, conditioning=3, others=2)
    assert units_of(dialogue).total == 8


def test_latents_are_denoising_steps():
    assert units_of(payload("latents", times=(7,), text=(4,))) == Units(decisions=7, conditioning=0)


def test_what_cannot_be_counted_is_named():
    for wrong, said in [
        (payload("latents"), "needs a flat array 'times', and has none"),
        (payload("tokens", prompt=(3,)), "needs a flat array 'completion', and has none"),
        (payload("tokens", prompt=(3,), completion=(1, 1)), r"'completion', and has one of shape \(1, 1\)"),
        (payload("tokens", prompt=(3,), completion=(2,), decided=(2,)), "`decided` is int32"),
        (payload("media"), "of kind 'media' has no decisions"),
    ]:
        with pytest.raises(DataError, match=said):
            units_of(wrong)


def test_the_longest_first_each_to_the_emptiest():
    assert balanced([5, 9, 4, 1], 2) == [(1, 3), (0, 2)]


def test_every_sequence_is_in_one_share():
    draw = random.Random(0)
    lengths = [draw.randrange(1, 1000) for _ in range(101)]
    shares = balanced(lengths, 7)
    assert sorted(index for share in shares for index in share) == list(range(101))
    totals = [sum(lengths[index] for index in share) for share in shares]
    assert max(totals) <= sum(lengths) / 7 * 4 / 3
    assert max(totals) - min(totals) <= max(lengths)


def test_fewer_sequences_than_shares_leave_some_empty():
    assert balanced([3], 3) == [(0,), (), ()]
    assert balanced([], 2) == [(), ()]
