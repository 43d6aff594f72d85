import attrs
import pytest

from cosmos_core.control.machine import history as records
from cosmos_core.control.machine import progress
from cosmos_core.errors import JournalError
from cosmos_core.run.follower import Follower, step_metrics
from cosmos_core.run.report.summary import summarise
from cosmos_core.run.supervisor import Ending
from cosmos_service_tools.auditor import Auditor


class Hooks:
    def __init__(self):
        self.calls = []

    def __call__(self, hook, **arguments):
        self.calls.append((hook.removeprefix("cosmos_"), arguments))

    def of(self, hook, *names):
        return [tuple(arguments[name] for name in names) for called, arguments in self.calls if called == hook]


def test_the_state_is_the_fold_of_the_journal(finished):
    follower = Follower()
    follower.fold(finished.entries)
    assert follower.state == finished.state
    assert follower.has_ended
    assert follower.last_sequence == len(finished.entries)
    assert [timed.record for timed in follower.steps] == finished.state.steps
    assert [timed.record.step for timed in follower.steps] == list(range(1, 10))
    assert [done.version for done in follower.evaluations] == [3, 6, 9]

    # Steps carry the time at which they were applied.
    follower = Follower()
    follower.fold(finished.entries)
    times = [timed.time for timed in follower.steps]
    assert times == sorted(times)
    assert 1000.0 < times[0] < times[-1] < 1000.0 + len(finished.entries)
    assert follower.timeline.sessions == [(1002.0, 1000.0 + len(finished.entries))]

    # Generated and trained units are counted.
    follower = Follower()
    follower.fold(finished.entries)
    trained = sum(step.num_units for step in finished.state.steps)
    assert follower.steps[-1].trained == trained

    # Evaluations and dropped groups were generated as well.
    assert follower.steps[-1].generated > trained

    # Metrics of a step are numbers with stable names.
    first, last = step_metrics(finished.state.steps[0]), step_metrics(finished.state.steps[-1])
    assert first["train/loss"] == 1.0
    assert "reward/mean" not in first
    assert last["reward/mean"] == last["reward/right"]
    assert last["staleness/max"] <= 2
    assert all(isinstance(value, int | float) for value in last.values())

    # A journal without its opening is refused.
    with pytest.raises(JournalError, match="no run was opened"):
        Follower().fold(finished.entries[1:])


def test_a_long_run_is_counted_whole_and_remembered_in_part(job, open_history, monkeypatch):
    monkeypatch.setattr(records, "MOST", 12)
    monkeypatch.setattr(records, "NEWEST", 4)
    monkeypatch.setattr(progress, "MOST_MARKS", 5)
    policy = attrs.evolve(job.recipe.policy, checkpoint=attrs.evolve(job.recipe.policy.checkpoint, interval=2))
    recipe = attrs.evolve(job.recipe, run=attrs.evolve(job.recipe.run, steps=57), policy=policy)
    history, hooks, seen, follower = open_history(attrs.evolve(job, recipe=recipe)), Hooks(), [], Follower()
    history.join()
    while history.turn():
        follower.fold(history.entries, hooks)
        seen += [record for record in history.state.steps if record.step > len(seen)]
        assert len(history.state.steps) <= 12
        assert len(history.state.marks) <= 7
    assert follower.state == history.state
    assert history.state.outcome == "finished"

    # All of the newest are there, and of each stage its ends and every second, fourth, ... of the others.
    steps = [timed.record.step for timed in follower.steps]
    assert steps == [record.step for record in history.state.steps]
    assert steps[-4:] == [57, 58, 59, 60]
    assert {1, 3, 4} <= set(steps)
    assert any(5 < step < 57 and step % 8 == 0 for step in steps)

    # Trackers were told of each; what is summed is summed over all.
    assert [arguments["step"] for name, arguments in hooks.calls if name == "step_finished"] == list(range(1, 61))
    summary = summarise(job, follower, Ending(outcome="finished"), wall_s=1.0)
    assert [stage["steps"] for stage in summary["stages"]] == [3, 57]
    consumed = [record for record in seen if record.reward is not None]
    assert summary["samples"]["consumed"] == sum(record.num_samples for record in consumed)
    lag = sum(record.staleness_mean * record.num_samples for record in consumed)
    assert summary["staleness"]["mean"] == round(lag / summary["samples"]["consumed"], 4)
    assert follower.steps[-1].trained == sum(record.num_units for record in seen)
    assert [stage["seconds"] > 0 for stage in summary["stages"]] == [True, True]
    # Of checkpoints the best one is kept, however old.
    assert progress.best_checkpoint(history.state) in history.state.marks

    # It goes back to a step whose record is gone.
    audited = Auditor()
    back = next(step for step in sorted(history.state.marks)[::-1] if step not in steps)
    history.resume(back)
    history.join(step=back)
    history.work(until=back + 1)
    for entry in history.entries:
        audited.take(*entry)
    assert audited.result().problems == ()
    follower.fold(history.entries)
    assert follower.state == history.state


def test_every_hook_is_told_once_of_each_thing(finished):
    hooks = Hooks()
    Follower().fold(finished.entries, hooks)
    assert hooks.of("step_finished", "step") == [(step,) for step in range(1, 10)]
    assert hooks.of("evaluation_finished", "step") == [(3,), (6,), (9,)]
    assert hooks.of("checkpoint_saved", "step", "path") == [
        (4, "checkpoints/step-4"),
        (8, "checkpoints/step-8"),
        (9, "checkpoints/step-9"),
    ]
    assert hooks.of("replica_joined", "replica", "role") == [("policy-0", "policy"), ("rollout-0", "rollout")]
    published = [version for (version,) in hooks.of("weights_published", "version")]
    assert published == sorted(set(published)) == list(range(3, 10))


def test_a_lost_replica_is_told_with_its_role_and_reason(history):
    hooks = Hooks()
    history.join()
    history.lose("rollout-0", "silent for 15 s")
    Follower().fold(history.entries, hooks)
    assert hooks.of("replica_left", "replica", "role", "reason") == [("rollout-0", "rollout", "silent for 15 s")]


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(history):
    history.join()
    history.work(until=6)
    ended_at = 1000.0 + len(history.entries)
    history.resume(4)
    follower = Follower()
    follower.fold(history.entries)
    assert follower.timeline.sessions[0][1] == ended_at, "the time until the resume is of no session"
    assert [timed.record.step for timed in follower.steps] == [1, 2, 3, 4]
    assert [done.version for done in follower.evaluations] == [3]
    assert follower.num_resumed == 1
    assert len(follower.timeline.sessions) == 2
    history.join(step=4)
    history.work()
    history.end()
    follower.fold(entry for entry in history.entries if entry[0] > follower.last_sequence)
    assert [timed.record for timed in follower.steps] == history.state.steps
    assert follower.state == history.state

    # Trained units per second are of the time between steps within sessions.
    history.join()
    history.work(until=6)
    history.resume(4)
    history.join(step=4)
    history.work()
    follower = Follower()
    follower.fold(history.entries)
    times, units = zip(*((timed.time, timed.record.num_units) for timed in follower.steps), strict=True)
    passed = times[3] - times[0] + times[8] - times[4]
    paces = follower.timeline.units_per_s(follower.steps)
    assert paces["policy"] == (sum(units[1:4]) + sum(units[5:])) / passed
    generated = [timed.generated for timed in follower.steps]
    assert paces["rollout"] == (generated[3] - generated[0] + generated[8] - generated[4]) / passed > 0
    assert follower.timeline.units_per_s(follower.steps[:1]) == {}


def test_rates_of_a_session_are_its_own(history):
    history.join()
    history.work(until=6)
    history.resume(4)
    follower = Follower()
    follower.fold(history.entries)
    assert follower.timeline.newest_steps(1) == []
    history.join(step=4)
    history.work(until=6)
    follower.fold(entry for entry in history.entries if entry[0] > follower.last_sequence)
    assert [timed.record.step for timed in follower.timeline.newest_steps(1)] == [5, 6]
