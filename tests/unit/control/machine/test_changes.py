"""Dynamic keys: which step a change holds from, in orders, leases and what the controller itself goes by."""

import attrs
import pytest

from cosmos_core.config.dynamic import DynamicKey
from cosmos_core.control.machine import changes, core
from cosmos_core.control.machine.core import refusal
from cosmos_core.control.machine.events import Commanded
from cosmos_core.control.machine.recovery import RECOVERY_SNAPSHOT, restored, snapshot_of
from cosmos_core.transport.messages import REQUEST, Set
from cosmos_core.transport.reports import StepFailed

LR, TEMPERATURE = "policy.optimizer.lr", "rollout.sampling.temperature"
DYNAMIC = (
    DynamicKey(key=LR, type="number", value=0.1, at_least=0.0),
    DynamicKey(key=TEMPERATURE, type="number", value=1.0, at_least=0.01),
    DynamicKey(key="sync.max_staleness", type="integer", value=1, at_least=0.0),
    DynamicKey(key="sync.interval", type="integer", value=1, at_least=1.0),
    DynamicKey(key="evaluation.interval", type="integer", value=0, at_least=0.0),
    DynamicKey(key="policy.checkpoint.interval", type="integer", value=0, at_least=0.0),
)


def put(run, *overrides):
    request = Set(overrides=overrides)
    assert refusal(run.state, request) == ""
    run.apply(Commanded(ident=f"set-{len(run.events)}", request=REQUEST.encode(request)))


def held(run):
    """(step, key, after) of each change."""
    return [(change.step, change.key, change.after) for change in run.state.changes]


@pytest.fixture
def started(run):
    """A run of a policy and a rollout replica, at step 0, with step 1 not ordered."""

    def start(policies=1, **options):
        found = run(**({"steps": 30, "dynamic": DYNAMIC, "policy_replicas": policies} | options))
        found.start(policies=policies)
        return found

    return start


def generate(run, number=2):
    for lease in run.leases()[:number]:
        run.finish("r0", lease)


def advance(run):
    """Generate for a step and train it."""
    step = run.state.step
    for _ in range(100):
        if run.state.step > step:
            return
        for lease in run.leases():
            run.finish("r0", lease)
        run.follow()
    raise AssertionError(f"step {step + 1} does not come")


def test_a_change_holds_from_the_next_step_for_every_replica(started):
    run = started(policies=2)
    put(run, f"{LR}=0.5")
    generate(run)
    orders = [run.directive(name).train for name in ("p0", "p1")]
    assert [order.settings for order in orders] == [{LR: 0.5}] * 2
    assert held(run) == [(1, LR, 0.5)]

    run = started()
    put(run, f"{LR}=0.5")
    advance(run)
    run.join("p1")
    run.settle("p0", "p1")
    generate(run)
    assert run.directive("p1").train.settings == {LR: 0.5}


def test_a_step_that_was_ordered_keeps_its_values_whoever_repeats_it(started):
    run = started(policies=2)
    generate(run)
    assert run.directive("p0").train.settings == {}
    put(run, f"{LR}=0.5")
    assert held(run) == [(2, LR, 0.5)]
    run.lose("p1")
    run.settle("p0")
    assert (run.state.steps[0].attempt, run.state.steps[0].settings) == (2, {})
    advance(run)
    assert run.state.steps[1].settings == {LR: 0.5}

    run = started()
    generate(run)
    order = run.directive("p0").train
    run.report("p0", StepFailed(step=1, attempt=1, generation=1, missing=(order.groups[0].lease,), reason="gone"))
    assert run.state.running is None
    put(run, f"{LR}=0.5")
    assert held(run) == [(2, LR, 0.5)]
    generate(run)
    assert (run.directive("p0").train.attempt, run.directive("p0").train.settings) == (2, {})


def test_several_keys_change_together_or_not_at_all(started):
    run = started()
    told = refusal(run.state, Set(overrides=(f"{LR}=0.5", f"{TEMPERATURE}=0")))
    assert told == f"{TEMPERATURE}: expected a number ≥ 0.01, got 0"
    before = list(run.state.changes)
    run.apply(Commanded(ident="bad", request=REQUEST.encode(Set(overrides=(f"{LR}=0.5", f"{TEMPERATURE}=0")))))
    assert run.state.changes == before == []

    run = started()
    assert "lag up to 2, more than the 1" in refusal(run.state, Set(overrides=("sync.interval=3",)))
    put(run, "sync.interval=3", "sync.max_staleness=2")
    assert "more than the 0" in refusal(run.state, Set(overrides=("sync.max_staleness=0",)))

    run = started()
    run.state.fail("for a reason")
    assert "the run is over" in refusal(run.state, Set(overrides=(f"{LR}=0.5",)))


def test_a_value_that_holds_already_is_no_change_and_the_recipes_own_is_no_setting(started):
    run = started()
    put(run, f"{LR}=0.1")
    assert held(run) == []
    put(run, f"{LR}=0.5")
    put(run, f"{LR}=0.1")
    assert [(change.before, change.after) for change in run.state.changes] == [(0.1, 0.5), (0.5, 0.1)]
    assert changes.values_at(run.state, 1) == {}


def test_leases_go_by_what_holds_when_they_are_given_and_orders_tell_of_each_group(started):
    run = started(sync_max_staleness=3, capacity=2)
    first = run.leases()
    put(run, f"{TEMPERATURE}=0.5")
    assert run.leases() == first
    for lease in first:
        run.finish("r0", lease)
    given = run.leases()
    assert [lease.settings for lease in first] == [{}] * len(first)
    assert [lease.settings for lease in given] == [{TEMPERATURE: 0.5}] * len(given)
    run.train()
    for lease in given:
        run.finish("r0", lease)
    order = run.state.running.order
    assert [group.settings for group in order.groups] == [{TEMPERATURE: 0.5}] * 2
    assert order.settings == {TEMPERATURE: 0.5}
    run.train()
    assert [step.drawn for step in run.state.steps] == [{}, {f"{TEMPERATURE}=0.5": 2}]


def test_the_interval_of_checkpoints_and_evaluations_changes_at_the_boundary(started):
    run = started(evaluation_prompts=2)
    put(run, "policy.checkpoint.interval=2", "evaluation.interval=3")
    for _ in range(6):
        advance(run)
    assert {2, 4, 6} <= run.state.checkpoints.saved.keys() | {run.state.checkpoints.ordered}
    versions = {record.version for record in run.state.evaluations} | {due.version for due in run.state.pending}
    assert {0, 3, 6} <= versions
    assert 2 not in versions


def test_the_pace_can_change_at_any_step_without_starving_the_run(started, subtests):
    """Whatever was published last, samples that are fresh enough can always be made."""
    for steps in [2, 3, 4, 5]:
        for before, after in [((1, 1), (4, 3)), ((4, 3), (5, 5)), ((6, 7), (1, 2)), ((3, 4), (0, 1))]:
            with subtests.test(steps=steps, before=before):
                (bound, interval), (new_bound, new_interval) = before, after
                base = {"sync.max_staleness": bound, "sync.interval": interval}
                run = started(
                    sync_max_staleness=bound,
                    sync_interval=interval,
                    dynamic=tuple(attrs.evolve(key, value=base.get(key.key, key.value)) for key in DYNAMIC),
                )
                for _ in range(steps):
                    advance(run)
                put(run, f"sync.max_staleness={new_bound}", f"sync.interval={new_interval}")
                for _ in range(12):
                    advance(run)
                newest = run.state.steps[-10:]
                assert max(step.staleness_max for step in newest) <= new_bound
                assert (run.state.settings.sync_max_staleness, run.state.settings.sync_interval) == after


def test_a_policy_is_told_to_publish_when_the_pace_changes_between_two_steps(started):
    pace = {"sync.max_staleness": 3, "sync.interval": 3}
    run = started(
        sync_max_staleness=3,
        sync_interval=3,
        dynamic=tuple(attrs.evolve(key, value=pace.get(key.key, key.value)) for key in DYNAMIC),
    )
    generate(run)
    run.train()
    assert (run.state.step, run.state.attempts, run.directive("p0").publish) == (1, 0, 0)
    run.state.touched.clear()
    put(run, "sync.interval=1")
    assert run.directive("p0").publish == 1
    assert "p0" in run.state.touched


def test_a_resumed_run_keeps_what_held_at_its_next_step_and_tells_of_the_rest(started):
    checkpoint = attrs.evolve(DYNAMIC[-1], value=2)
    run = started(
        policy_checkpoint_interval=2, dynamic=(*DYNAMIC[:-1], checkpoint), synchronous=True, sync_max_staleness=0
    )
    put(run, f"{LR}=0.5")
    advance(run)
    advance(run)
    put(run, f"{LR}=0.25")
    advance(run)
    put(run, "evaluation.interval=3")
    assert held(run) == [(1, LR, 0.5), (3, LR, 0.25), (4, "evaluation.interval", 3)]
    run.resume(2)
    assert held(run) == [(1, LR, 0.5), (3, LR, 0.25)]
    assert run.state.settings.evaluation_interval == 0
    assert "going on from step 2 undid evaluation.interval = 3 from step 4 on" in run.state.status_details["settings"]
    assert core.fold(run.events) == run.state

    run = started()
    put(run, "evaluation.interval=5", f"{LR}=0.5")
    changed = [attrs.evolve(key, value=7) if key.key == "evaluation.interval" else key for key in DYNAMIC]
    run.resume(0, attrs.evolve(run.events[0].settings, dynamic=tuple(changed), evaluation_interval=7))
    assert held(run) == [(1, LR, 0.5)]
    assert run.state.settings.evaluation_interval == 7


def test_a_recovery_snapshot_holds_the_changes(started):
    run = started()
    put(run, f"{LR}=0.5", "sync.max_staleness=4")
    advance(run)
    run.state.mark()
    snapshot = RECOVERY_SNAPSHOT.decode(RECOVERY_SNAPSHOT.encode(snapshot_of(run.state, run.state.step)))
    state = restored(snapshot, "somewhere")
    assert changes.values_at(state, state.step + 1) == {LR: 0.5, "sync.max_staleness": 4}
    assert state.settings.sync_max_staleness == 4
