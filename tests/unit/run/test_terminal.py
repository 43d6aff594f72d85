"""What a terminal is told of who comes and goes."""

from __future__ import annotations

import attrs
import pytest

from cosmos_core.run.follower import Follower
from cosmos_core.run.supervisor import TerminalLog


@pytest.fixture
def told(job):
    """TerminalLog of a session that started the replicas of the recipe, and what was said."""
    said = []
    return TerminalLog(job, said.append, is_own={"policy-0", "rollout-0"}.__contains__), said


def test_who_comes_and_goes_is_told_and_settings(told):
    # Of replicas that it started only leaving is told and of others all.
    news, said = told
    for name in ("rollout-0", "rollout-x"):
        news.hear("cosmos_replica_joined", replica=name, role="rollout")
        news.hear("cosmos_replica_left", replica=name, role="rollout", reason="silent for 15 s")
        news.hear("cosmos_replica_left", replica=name, role="rollout", reason="drained")
    news.hear("cosmos_step_finished", step=1, metrics={})
    assert said == [
        "rollout-0 has left",
        "rollout-x has joined",
        "rollout-x was lost: silent for 15 s",
        "rollout-x has left",
    ]

    # A setting is told with its step.
    said.clear()
    news.hear("cosmos_setting_changed", step=7, key="policy.optimizer.lr", before=1e-4, after=5e-5)
    assert said == ["policy.optimizer.lr: 0.0001 -> 5e-05 from step 7 on"]


def test_that_nobody_is_left_is_told_once_and_who_comes_then(told, history):
    news, said = told
    history.join()
    follower = Follower()
    follower.fold(history.entries, news.hear)
    news.look(follower.state)
    assert said == []
    for _ in range(2):
        said.clear()
        history.lose("rollout-0", "killed")
        follower.fold(history.entries, news.hear)
        news.look(follower.state)
        news.look(follower.state)
        (words,) = said
        assert words.startswith("no rollout replica is left: the run fails unless one joins within ")
        history.join(roles=("rollout",))
        follower.fold(history.entries, news.hear)
        news.look(follower.state)
        assert said[1:] == ["rollout-0 has joined"]


def test_who_is_asked_to_leave_is_told_once(told, history):
    news, said = told
    history.join()
    state = history.state
    state.draining.add("rollout-0")
    for _ in range(2):
        news.look(state)
    assert said == ["rollout-0 is leaving, as soon as it has finished what it has begun"]


def test_of_problems_of_an_earlier_session_nothing_is_told(job, history):
    state, said = history.state, []
    state.status_details["reward_error"] = "of yesterday"
    news = TerminalLog(job, said.append, is_own=bool, earlier=state)
    news.look(state)
    assert said == []
    # As a report brings it: the same words, anew.
    words = ["of", "yesterday"]
    state.status_details |= {"reward_error": " ".join(words), "bad_row": "row 3"}
    news.look(state)
    news.look(state)
    assert said == ["reward_error: of yesterday", "bad_row: row 3"]


def test_why_a_run_does_not_learn_is_told_once(told, finished):
    news, said = told
    state = finished.state
    for cut, number in [(0.0, 0), (1.0, 1), (0.0, 1), (1.0, 1)]:
        state.steps = [attrs.evolve(each, truncated=cut) for each in state.steps]
        news.look(state)
        assert len([words for words in said if words.startswith("truncated: 100% of the completions")]) == number
