from __future__ import annotations

import copy

import pytest

from cosmos_core.control.machine.directives import directive_for
from cosmos_core.transport.reports import WeightsLoaded, WeightsRejected


def test_deriving_a_directive_changes_nothing(run):
    it = run(evaluation_prompts=2)
    it.start()
    before = copy.deepcopy(it.state)
    for name in it.state.replicas:
        assert directive_for(it.state, name) == directive_for(it.state, name)
    assert it.state == before


def load_again(it):
    version = it.fakes["r0"].version = it.state.replicas["r1"].version
    digest = it.state.published[version].digest
    it.report("r0", WeightsLoaded(version=version, digest=digest, transfer_s=0.0, paused_s=0.0, nbytes=1))


EVENTS = {
    12: [lambda it: it.lose("r1")],
    20: [lambda it: it.join("r1")],
    22: [lambda it: it.report("r0", WeightsRejected(version=it.state.target, digest="x", expected="y"))],
    23: [load_again],
    24: [lambda it: it.lose("p0")],
    30: [lambda it: it.join("p0")],
}


@pytest.mark.parametrize("fan_out", [1, 8])
def test_every_change_of_a_directive_is_announced(run, fan_out):
    """The server only derives directives of touched replicas, so none may change without that."""
    it = run(
        warmup=2,
        steps=5,
        policy_replicas=2,
        rollout_replicas=3,
        evaluation_prompts=3,
        policy_checkpoint_interval=2,
        sync_fan_out=fan_out,
        shares_memory=False,
    )
    known = {}
    apply = it.apply

    def checked(event):
        it.state.touched.clear()
        apply(event)
        for name in set(known) - set(it.state.replicas):
            del known[name]
        for name in it.state.replicas:
            new = it.directive(name)
            if known.get(name) != new:
                assert name in it.state.touched, (name, type(event).__name__, known.get(name), new)
            known[name] = new

    it.apply = checked
    for name in ("p0", "p1", "r0", "r1", "r2"):
        it.join(name)
    for turn in range(200):
        it.follow()
        for happens in EVENTS.get(turn, ()):
            happens(it)
    assert it.state.outcome == "finished"


def test_everyone_is_told_to_stop_when_the_run_is_over(run):
    it = run()
    it.start()
    assert not any(it.directive(name).stop for name in it.fakes)
    it.state.fail("x")
    assert all(it.directive(name).stop for name in it.fakes)
    assert {"p0", "r0"} <= it.state.touched
