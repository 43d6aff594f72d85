"""What a run that does not learn says, by records that are made up: each finding, and what is just not one."""

import random

import attrs
import pytest

from cosmos_core.control.live.diagnosis import LEAST_STEPS, findings
from cosmos_core.control.machine.records import EvaluationRecord, SettingChange, StepRecord
from cosmos_core.control.machine.state import opened
from cosmos_core.transport.reports import Troubled
from tests.run_settings import demonstrations, rollouts, small_settings

SOUND = StepRecord(
    step=1,
    stage=0,
    attempt=1,
    skipped=False,
    num_groups=4,
    num_samples=16,
    num_units=160,
    reward=0.5,
    rewards={},
    truncated=0.25,
    failed={},
    staleness_mean=0.0,
    staleness_max=0,
    metrics={"lr": 1e-3, "trained_sequences": 12.0, "entropy": 1.0, "ratio": 1.0, "clip_fraction": 0.1},
    dropped={},
    equal={0.0: 2},
)


def step(number=1, metrics=None, **changes):
    return attrs.evolve(SOUND, step=number, metrics={**SOUND.metrics, **(metrics or {})}, **changes)


STAGES = (rollouts(0, 100, 4),)


def state_of(*records, stages=STAGES, dropped=None, evaluations=()):
    """A state whose newest steps are these, numbered anew, and whose stage has dropped as many prompts."""
    state = opened(small_settings(*stages))
    state.steps = [attrs.evolve(each, step=number) for number, each in enumerate(records, 1)]
    state.step = len(records)
    state.ledger.dropped.update(dropped or {})
    state.evaluations += evaluations
    return state


def told(*records, **changes):
    """The texts of all findings, by code."""
    return {found.code: found.text for found in findings(state_of(*records, **changes))}


def newest(number=LEAST_STEPS, **changes):
    return [step(**changes) for _ in range(number)]


def test_a_run_that_learns_has_no_finding_and_neither_has_one_that_has_not_begun():
    assert told() == {}
    assert told(*newest(50)) == {}
    # Nothing is said of a few steps, however bad they are.
    bad = {"equal": {0.0: 4}, "truncated": 1.0, "metrics": {"lr": 1e-12, "ratio": 9.0}}
    assert told(*newest(LEAST_STEPS - 1, **bad)) == {}
    assert set(told(*newest(LEAST_STEPS, **bad))) == {"equal", "truncated", "learning-rate", "off-policy"}


def test_a_finding_is_of_the_newest_steps_and_goes_when_they_are_sound():
    cut = newest(10, truncated=1.0)
    assert "truncated" in told(*newest(10), *cut, *cut)
    assert told(*cut, *newest(20)) == {}
    # Those of the warm-up are of another stage.
    cut = [step(stage=0, truncated=1.0) for _ in range(10)]
    state = state_of(*cut, *newest(5, stage=1), stages=(demonstrations(0, 10, 4), rollouts(10, 90, 4)))
    assert state.stage_index == 1
    assert findings(state) == ()


def test_rewards_that_are_all_equal_unless_that_was_learned():
    text = told(*newest(equal={0.0: 3, 1.0: 1}))["equal"]
    assert text.startswith("all rewards are equal in 100% of the groups of the newest 5 steps (0 in 15, 1 in 5), so")
    # Too hard, too easy or both: the keys to change are others.
    look, mend = "look at some (cosmos samples RUN): if answers are right, ", "mend the reward"
    easy = f"{look}the rows are too easy: take harder ones (dataset); if not, {mend}, or take easier rows"
    for equal, reward, advice in (
        ({0.0: 3, 1.0: 1}, 0.25, "change the reward, the rows"),
        ({0.0: 4}, 0.0, f"{look}{mend}; if none is, take easier rows"),
        # Answers that are cut off have less than wrong ones.
        ({0.0: 4}, -0.1, f"{look}{mend}; if none is, take easier rows"),
        ({1.0: 4}, 1.0, easy),
        # The form alone may be rewarded; but a reward that was higher is of a better answer.
        ({0.1: 4}, 0.1 + 1e-17, easy),
        ({0.1: 4}, 0.2, f"{look}{mend}; if none is, take easier rows"),
    ):
        (found,) = findings(state_of(*newest(equal=equal, reward=reward)))
        assert found.advice.startswith(advice), (equal, reward)
    earlier = [step(equal={0.5: 1}, reward=0.1), *newest(20, equal={0.1: 4}, reward=0.1)]
    assert findings(state_of(*earlier))[0].advice.startswith(f"{look}{mend}; if none is, take easier rows")
    assert "equal" in told(*newest(15, equal={0.0: 3}), *newest(20, equal={0.0: 4}, reward=0.5))
    assert "equal" not in told(*newest(equal={0.0: 3}))
    # A reward that has risen until nearly every group is right is what a run is for;
    assert "equal" not in told(*newest(15, equal={0.0: 1}, reward=0.2), *newest(20, equal={0.0: 4}, reward=1.0))
    # one that only wanders, with equal groups from the first step on, is not.
    assert "equal" in told(*newest(15, equal={0.0: 4}, reward=0.2), *newest(20, equal={0.0: 4}, reward=0.3))


def test_completions_that_are_cut_off():
    assert told(*newest(truncated=0.6))["truncated"].startswith("60% of the completions of the newest 5 steps")
    assert told(*newest(truncated=0.5)) == {}
    assert told(*newest(truncated=0.6, reward=None)) == {}
    # A policy that has collapsed never ends, which shows before a fall of the reward is sure: one cause, one finding.
    good, lost = newest(3), newest(20, truncated=1.0, reward=0.0)
    for number in range(len(lost) + 1):
        expected = {"collapsed"} if number >= LEAST_STEPS else set()
        assert set(told(*good, *lost[:number])) == expected
    assert "truncated" in told(*newest(3), *newest(10, truncated=1.0))


def test_a_learning_rate_that_moves_nothing():
    (found,) = findings(state_of(*newest(metrics={"lr": 9e-9})))
    assert found.code == "learning-rate"
    assert "9e-09: in 100 steps" in found.text
    assert found.advice.startswith("raise policy.optimizer.lr;")
    assert str(found) == f"learning-rate: {found.text}; {found.advice}"
    assert told(*newest(metrics={"lr": 1.1e-8})) == {}
    # A schedule that ends near 0 began higher.
    assert told(*newest(metrics={"lr": 1e-4}), *newest(20, metrics={"lr": 1e-12})) == {}
    # A warm-up has an optimizer of its own.
    stages = (demonstrations(0, 50, 4), rollouts(50, 10, 4))
    plain = {"reward": None, "equal": {}, "metrics": {"lr": 1e-12, "trained_sequences": 4.0}}
    (found,) = findings(state_of(*newest(**plain), stages=stages))
    assert "warmup.optimizer.lr" in found.advice


def test_nothing_that_is_trained_on():
    text = told(*newest(3, skipped=True), *newest(2))["untrained"]
    assert text == "the gradient of 3 of the newest 5 steps was not finite, so that the weights stayed as they were"
    assert told(*newest(3, skipped=True), *newest(3)) == {}
    idle = {"trained_sequences": 0.0}
    assert told(*newest(metrics=idle))["untrained"].startswith("no sample of the newest 5 steps was trained on")
    assert told(*newest(4, metrics=idle), step()) == {}
    # Where that is because rewards are equal, it is said once.
    assert set(told(*newest(metrics=idle, equal={0.0: 4}))) == {"equal"}


def test_entropy_that_collapsed_without_a_better_reward():
    low = newest(20, metrics={"entropy": 0.09})
    assert told(*newest(), *low)["entropy"].startswith("the entropy fell from 1 to 0.09")
    assert told(*newest(), *newest(20, metrics={"entropy": 0.11})) == {}
    assert told(*newest(), *newest(20, metrics={"entropy": 0.09}, reward=0.6)) == {}


def test_a_ratio_or_a_clip_fraction_that_is_far_off(subtests):
    for metrics, text in [
        ({"ratio": 2.1}, "the mean ratio of the new to the old policy is 2.1"),
        ({"ratio": 0.4}, "the mean ratio of the new to the old policy is 0.4"),
        ({"clip_fraction": 0.6}, "60% of the decisions of the newest 5 steps are clipped"),
        ({"ratio": 1.9, "clip_fraction": 0.5}, None),
        ({"ratio": 0.6}, None),
    ]:
        with subtests.test(metrics=metrics):
            found = told(*newest(metrics=metrics)).get("off-policy")
            assert found is text if text is None else found.startswith(text)


def test_scores_that_are_waited_for():
    slow = {"wait_s": 3.0, "forward_backward_s": 1.0, "lr": 1e-3}
    text = told(*newest(awaited_s=2.0, metrics=slow))["scores"]
    assert text == "50% of the time of the newest 5 steps went by waiting for scores"
    assert told(*newest(awaited_s=1.0, metrics=slow)) == {}
    # Reward processes have to start.
    assert told(*newest(awaited_s=1.0, metrics={"wait_s": 1.0, "lr": 1e-3})) == {}
    assert "scores" in told(*newest(awaited_s=1.1, metrics={"wait_s": 1.1, "lr": 1e-3}))
    # While the policy trains, nobody waits for them.
    assert told(*newest(awaited_s=9.0, metrics={"wait_s": 0.5, "forward_backward_s": 3.5})) == {}
    state = state_of(*newest(awaited_s=2.0, metrics=slow, failed={"reward_timeout": 2}))
    state.status_details["reward_timeout"] = "hang: no score within 3 s"
    for what, number in [("processes of reward die that ended", 3), ("samples that could not be written", 9)] * 2:
        state.count(Troubled(what=what, number=number, last="exit code 3"))
    (found,) = findings(state)
    assert found.text == (
        f"{text}; 10 of 90 samples were late (hang: no score within 3 s); processes of reward die that ended: 6, "
        "the last: exit code 3"
    )
    assert "raise rollout.reward_workers; where scores are late, lower reward.N.timeout_s" in found.advice
    # Where scores hang, five steps may take a day.
    hung = {"awaited_s": 60.0, "metrics": {"wait_s": 60.0}}
    assert told(step(**hung, failed={"reward_timeout": 15})) == {}
    assert told(step(**hung, failed={"reward_timeout": 16}))["scores"].startswith("100% of the time of the first step")


def test_prompts_that_are_dropped_before_or_between_steps():
    # Nothing has a reward: no step is ever made.
    state = state_of(dropped={"unscored": 16})
    state.status_details.update(checkpoint="no space", reward_failed="brevity: KeyError: 'x' (mine.py:3)")
    (found,) = findings(state)
    assert found.code == "unscored"
    assert found.text == (
        "64 of the newest 64 samples have no reward (reward_failed: brevity: KeyError: 'x' (mine.py:3))"
    )
    assert told(dropped={"unscored": 3}) == {}
    # Half of the samples of the groups that are trained on.
    assert told(*newest(num_samples=7, failed={"reward_failed": 9}))["unscored"].startswith("45 of the newest 80")
    assert told(*newest(num_samples=8, failed={"reward_failed": 8})) == {}

    assert told(*newest(10), dropped={"stale": 16})["stale"].startswith("16 of the newest 56 prompts were too old")
    assert told(*newest(20, num_groups=10), dropped={"stale": 22}) == {}
    assert "stale" in told(*newest(20, num_groups=10), dropped={"stale": 23})
    assert told(*newest(1), dropped={"stale": 15}) == {}
    assert "stale" in told(*newest(19, dropped={"stale": 100}), dropped={"stale": 100})
    # What was dropped before the newest steps is no longer held against the run.
    assert told(*newest(25, dropped={"stale": 100}), dropped={"stale": 100}) == {}

    state = state_of(*newest(1), dropped={"equal rewards": 50, "too_long": 10})
    assert [found.text for found in findings(state)] == [
        "60 of the newest 64 prompts were dropped, most of them for 'equal rewards'"
    ]
    assert told(*newest(2), dropped={"equal rewards": 50}) == {}


HIGH = (0.62, 0.55, 0.6, 0.58, 0.64, 0.57, 0.6, 0.59)
LOW = (0.025, 0.03, 0.02, 0.025, 0.025)


def rewarded(rewards, **changes):
    return [step(reward=reward, **changes) for reward in rewards]


def test_a_reward_that_collapsed_is_told_before_and_instead_of_its_consequences():
    low = rewarded(LOW * 10, equal={0.0: 4}, truncated=1.0, metrics={"entropy": 0.01, "clip_fraction": 0.6})
    state = state_of(*rewarded(HIGH), *low)
    # The rewards of step 9, which are low, are of samples that were drawn with the weights of step 8.
    state.checkpoints.saved.update({3: "three", 4: "four", 7: "seven", 8: "eight", 40: "forty"})
    collapsed, off_policy = findings(state)
    assert off_policy.code == "off-policy"
    assert str(collapsed) == (
        "collapsed: the reward fell from 0.594 to 0.025 since step 9; lower policy.optimizer.lr; go on from an earlier "
        "checkpoint: cosmos run --resume RUN --from step-7"
    )
    # Those that are removed are not named.
    state.checkpoints.removed.add(7)
    assert findings(state)[0].advice.endswith("--from step-4")
    state.checkpoints.removed.clear()
    # Older samples say nothing of newer weights.
    state.steps[7] = attrs.evolve(state.steps[7], staleness_max=3)
    assert findings(state)[0].advice.endswith("--from step-4")
    # The best one is kept for sure, and what was set is said with its step.
    state.evaluations += [heldout(3, 0.9), heldout(7, 0.5)]
    state.changes.append(SettingChange(step=7, key="policy.optimizer.lr", before=5e-4, after=5.0))
    collapsed, _ = findings(state)
    assert "since step 9 (policy.optimizer.lr was set to 5.0 at step 7)" in collapsed.text
    assert collapsed.advice.startswith("lower policy.optimizer.lr; go on")
    assert collapsed.advice.endswith("--from step-3")
    state.changes[:] = [SettingChange(step=8, key="rollout.sampling.temperature", before=1.0, after=9.0)]
    assert findings(state)[0].advice.startswith("set rollout.sampling.temperature back to 1.0; go on")
    # One that was set after the fall, to mend it, has nothing to do with it.
    state.changes[:] = [SettingChange(step=10, key="policy.optimizer.lr", before=5e-4, after=1e-4)]
    assert "was set" not in findings(state)[0].text
    # What it has come back to is that of the newest steps.
    creeping = told(*rewarded(HIGH), *rewarded(LOW * 12), *rewarded((0.1, 0.11) * 10))
    assert creeping["collapsed"] == "the reward fell from 0.594 to 0.105 since step 9"
    # At once, too: a learning rate that is far too high takes three steps.
    fast = findings(state_of(*rewarded((0.425, 0.315, 0.458, *LOW)), stages=STAGES))
    assert fast[0].text == "the reward fell from 0.399 to 0.025 since step 4"
    assert fast[0].advice == "lower policy.optimizer.lr; begin anew, as no checkpoint is from before"


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1e-4, 0.0), (1e6, 0.0), (1.0, -1.0), (10.0, -10.0)])
def test_a_collapse_is_one_at_any_scale_and_below_0_and_holds_until_the_reward_is_back(scale, offset):
    def collapses(*rewards):
        return "collapsed" in told(*rewarded(offset + scale * each for each in rewards))

    rise = [0.1 + 0.025 * number for number in range(20)]
    assert collapses(*HIGH, *LOW)
    assert collapses(*rise, *HIGH, *LOW * 3)
    assert not collapses(*HIGH, *LOW[:4])
    assert collapses(*HIGH, *LOW * 60)
    assert not collapses(*HIGH, *LOW * 12, *HIGH * 3)
    # Noise, a step that failed, rewards that never rose, and a fall to what is still far above the beginning.
    assert not collapses(*HIGH * 8)
    assert not collapses(*HIGH * 3, 0.0, *HIGH)
    assert not collapses(*LOW * 8)
    assert not collapses(*rise, *HIGH * 2, *(0.4, 0.38, 0.42, 0.35, 0.41) * 4)
    assert not collapses(*(0.4, 0.1, 0.7, 0.3, 0.5) * 4, *(0.3, 0.05, 0.5, 0.2, 0.3) * 4)
    # Large batches show small falls for sure, which other rows may make.
    harder = rewarded(offset + scale * each for each in (*HIGH * 3, *(0.45, 0.47, 0.46) * 7))
    assert "collapsed" not in told(*[attrs.evolve(each, num_groups=100) for each in harder])
    assert "collapsed" in told(*harder)


@pytest.mark.parametrize(("high", "low", "is_told"), [(0.5, 0.49, False), (0.898, 0.859, False), (0.5, 0.44, True)])
def test_a_fall_of_less_than_a_tenth_is_a_trifle_however_sure(high, low, is_told):
    noise = (0.001, -0.001) * 10
    steps = rewarded([*(high + each for each in noise), *(low + each for each in noise)])
    assert ("collapsed" in told(*steps)) is is_told


def losses_of(*losses, stage=0):
    return [step(metrics={"loss": loss}, reward=None, equal={}, stage=stage) for loss in losses]


def test_a_loss_that_training_made_worse():
    stages = (demonstrations(0, 50, 4), rollouts(50, 100, 4))
    wild = (460.0, 640.0, 1500.0, 1800.0, 3300.0, 2900.0, 1200.0, 1100.0, 900.0)
    (found,) = findings(state_of(*losses_of(5.57, *wild), stages=stages))
    assert found.text == "the loss rose from 5.57 in the first step of the warm-up to 1.88e+03"
    assert found.advice.startswith("lower warmup.optimizer.lr; begin anew")
    assert told(*losses_of(5.57, *wild[:-1]), stages=stages) == {}
    assert told(*losses_of(5.57, *(8.0, 6.0) * 10), stages=stages) == {}
    # As much, and sure: it is as of a model that has lost all it knew.
    assert "collapsed" in told(*losses_of(1.2, *(8.5, 9.5) * 10), stages=stages)
    assert told(*losses_of(5.57, *wild, 5.0), stages=stages) == {}
    nan = float("nan")
    assert told(*losses_of(5.57, *[4.0] * 8, nan, nan), stages=stages) == {}
    assert told(*losses_of(*[nan] * 12), stages=stages) == {}
    # It still holds in the main stage, where it explains rewards that are all equal, until they rise.
    warmup = losses_of(*(5.57, *wild * 6)[:50])
    state = state_of(*warmup, *[step(stage=1, reward=0.1, equal={0.0: 4}) for _ in range(8)], stages=stages)
    assert [each.code for each in findings(state)] == ["collapsed"]
    assert findings(state)[0].advice.startswith("lower warmup.optimizer.lr;")
    rising = [step(stage=1, reward=0.1 * number) for number in range(8)]
    assert told(*warmup, *rising, stages=stages) == {}
    # Where demonstrations are all that is learned, a loss may have fallen first.
    main = (demonstrations(0, 100, 4),)
    good = [3.0, 2.0, 1.0, 0.5, 0.4, 0.3, 0.35, 0.32]
    assert told(*losses_of(*good, *[4.0, 4.2] * 5), stages=main)["collapsed"].startswith("the loss rose from 0.")
    assert told(*losses_of(*good, *[0.5, 0.6] * 5), stages=main) == {}


@pytest.mark.parametrize("spread", [0.2, 0.4, 0.6])
def test_noise_around_a_flat_loss_is_no_collapse(spread):
    draw = random.Random(4)
    for _ in range(40):
        losses = [draw.gauss(1.2, spread) for _ in range(60)]
        losses[0] = max(0.01, 1.2 - 2.5 * spread)
        for number in range(2 * LEAST_STEPS, len(losses), LEAST_STEPS):
            assert told(*losses_of(*losses[:number]), stages=(demonstrations(0, 100, 4),)) == {}


def heldout(version, score=None, loss=None, *, num_prompts=400, **changes):
    record = EvaluationRecord(
        version=version,
        accuracy=score,
        reward=score,
        num_prompts=num_prompts,
        num_unscored=0,
        num_truncated=0,
        completions=(),
        loss=loss,
    )
    return attrs.evolve(record, **changes)


def test_training_that_gets_better_while_held_out_rows_get_worse():
    rising = [step(reward=0.3 + 0.005 * number) for number in range(80)]
    scores = [heldout(20 * number, score) for number, score in enumerate((0.7, 0.65, 0.6, 0.55))]
    assert told(*rising, evaluations=scores)["overfitted"] == (
        "training gets better and held-out rows worse: their score was 0.7 at step 0, then 0.65 at step 20, "
        "then 0.6 at step 40, then 0.55 at step 60"
    )
    # Two declines, a fall that has ended, and one that training shares.
    assert told(*rising, evaluations=scores[1:]) == {}
    assert told(*rising, evaluations=[*scores[:2], heldout(40, 0.66), scores[3]]) == {}
    assert told(*rising, evaluations=[*scores, heldout(80, 0.6)]) == {}
    assert "overfitted" not in told(*rising[::-1], evaluations=scores)
    # Of 40 prompts chance makes such a fall: its standard error is 0.11.
    few = [attrs.evolve(each, num_prompts=40) for each in scores]
    assert told(*rising, evaluations=few) == {}
    assert told(*rising, evaluations=[heldout(20 * number, 0.7 - 0.01 * number) for number in range(4)]) == {}
    # Other rewards have the spread that was measured, whatever their sign.
    for spread, is_told in [(0.3, True), (2.0, False)]:
        other = [attrs.evolve(each, accuracy=None, reward=each.reward - 1.0, spread=spread) for each in scores]
        text = told(*rising, evaluations=other).get("overfitted", "")
        assert ("their score was -0.3 at step 0" in text) is is_told

    falling = losses_of(*(2.0 - 0.01 * number for number in range(80)))
    losses = [heldout(20 * number, loss=1.0 + 0.1 * number) for number in range(4)]
    stages = {"stages": (demonstrations(0, 100, 4),)}
    assert "their loss was 1 at step 0" in told(*falling, evaluations=losses, **stages)["overfitted"]
    paired = attrs.evolve(demonstrations(0, 100, 4), source="preferences")
    assert told(*falling, evaluations=losses, stages=(paired,)) == {}


@pytest.mark.parametrize(("skipped", "metrics", "trained"), [(False, {}, 12), (True, {}, 0)])
def test_samples_count_as_trained_on_where_they_had_a_part_in_the_gradient(skipped, metrics, trained):
    assert step(skipped=skipped, metrics=metrics).num_trained == trained
    # Steps of earlier releases do not say.
    assert attrs.evolve(SOUND, metrics={}).num_trained == SOUND.num_samples
