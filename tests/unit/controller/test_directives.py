from __future__ import annotations

import copy

from cosmos_core.controller.directives import directive_for


def test_deriving_a_directive_changes_nothing(run):
    it = run(evaluation_prompts=2)
    it.start()
    before = copy.deepcopy(it.state)
    for name in it.state.replicas:
        assert directive_for(it.state, name) == directive_for(it.state, name)
    assert it.state == before


def test_every_change_of_a_directive_is_announced(run):
    """The server only derives directives of touched replicas, so none may change without that."""
    it = run(warmup=2, steps=5, num_policies=2, num_rollouts=2, evaluation_prompts=3, checkpoint_interval=2)
    known = {}
    apply = it.apply

    def checked(event):
        it.state.touched.clear()
        apply(event)
        for name in it.state.replicas:
            new = it.directive(name)
            if name in known and known[name] != new:
                assert name in it.state.touched, (name, type(event).__name__, known[name], new)
            known[name] = new

    it.apply = checked
    for name in ("p0", "p1", "r0", "r1"):
        it.join(name)
    for turn in range(200):
        it.follow()
        if turn == 12:
            it.lose("r1")
            known.pop("r1")
        if turn == 20:
            it.join("r1")
        if turn == 24:
            it.lose("p0")
            known.pop("p0")
        if turn == 30:
            it.join("p0")
    assert it.state.outcome == "finished"


def test_everyone_is_told_to_stop_when_the_run_is_over(run):
    it = run()
    it.start()
    assert not any(it.directive(name).stop for name in it.fakes)
    it.state.fail("x")
    assert all(it.directive(name).stop for name in it.fakes)
    assert {"p0", "r0"} <= it.state.touched
