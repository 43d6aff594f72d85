"""Whose failure the end of a process is, and how often another one takes its place."""

from __future__ import annotations

from cosmos_core.run.launch import Exit
from cosmos_core.run.restart_policy import WINDOW_S, Restarts, cause_of


def test_an_exit_code_says_whose_failure_it_is():
    for code, cause in [
        (-9, "killed"),
        (-11, "killed"),
        (143, "killed"),
        (137, "killed"),
        (75, "killed"),
        (77, "refused"),
        (0, "left"),
        (1, "failed"),
    ]:
        assert cause_of(Exit(name="policy-0", code=code, error="")) == cause


def test_a_replica_is_started_again_so_often_and_no_more_until_that_is_long_ago():
    restarts = Restarts(2)
    assert [restarts.take("rollout-0", now) for now in (0.0, 1.0, 2.0)] == [True, True, False]
    assert restarts.take("rollout-1", 2.0)
    assert not restarts.take("rollout-0", WINDOW_S)
    assert restarts.take("rollout-0", WINDOW_S + 0.5)
    assert not restarts.take("rollout-0", WINDOW_S + 0.6)

    # None is none.
    assert not Restarts(0).take("controller", 0.0)
