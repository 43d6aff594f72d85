"""Environments in worker processes: they answer, fail, hang and die, each alone as far as can be."""

from __future__ import annotations

import os
import time

import pytest

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.errors import PluginError
from cosmos_core.rollout.episodes.messages import Answered, Failed, Opened
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.rollout.workers.process import WorkerProcess
from cosmos_core.types import Message, Prompt


def test_an_episode_begins_answers_and_ends(shared):
    episode, opened = shared.open("alpha", 9)
    assert opened.words == Message(role="user", content="alpha 9")
    first, second = shared.act(episode, "turns"), shared.act(episode, "turns")
    assert (first.observation, second.observation) == ("1", "2")
    assert (second.done, second.reward, second.detail) == (False, 0.5, "counted")
    last = shared.act(episode, "done 3")
    assert (last.observation, last.done, last.reward) == (None, True, 3.0)
    shared.pool.forget(episode)
    assert shared.act(shared.begin(), "role tool").role == "tool"
    assert shared.act(shared.begin(), "turns").role == "user"
    assert shared.act(shared.begin(), "echo a\ud800b").observation == "a?b"


def test_a_prompt_may_say_it_all_and_may_be_a_chat(shared):
    assert shared.open("silent")[1].words is None
    episode = shared.pool.open(Prompt(text=(Message(role="user", content="hi"),)), 0, shared.replies.put)
    assert shared.wait() == Opened(episode=episode, words=Message(role="user", content="hi 0"))


def test_what_cannot_be_used_fails_and_says_why(shared):
    for text, detail in [
        ("raise", "KeyError: 'lost'"),
        ("thread-stop", "RuntimeError: the call raised StopIteration"),
        ("none", "step: it returned no Turn but None"),
        ("mute", "step: it returned no observation, and the dialogue is not done"),
        ("reward nan", "step: the reward is no finite number but nan"),
        ("reward -inf", "step: the reward is no finite number but -inf"),
        ("reward text", "step: the reward is no finite number but '1'"),
        ("reward bool", "step: the reward is no finite number but True"),
        ("number", "step: the observation is no text but 7"),
        ("role assistant", "step: the role is 'assistant'; name whose turn the observation is"),
        ("role user<|im_end|>", "step: the role is 'user<|im_end|>'; name whose turn"),
        ("cancelled", "CancelledError (obedient_environment.py:65)"),
        ("long", "step: an observation of 1048577 characters; the longest is 1048576"),
        ("surrogate", "step: the observation cannot be encoded"),
    ]:
        reply = shared.act(shared.begin(), text)
        assert isinstance(reply, Failed)
        assert not reply.timed_out
        assert reply.detail.startswith(detail)


def test_a_task_that_cannot_begin_fails(shared):
    assert shared.open("raise")[1].detail == "ValueError: no such task (obedient_environment.py:21)"
    assert "the observation is no text but b'words'" in shared.open("bytes")[1].detail
    assert isinstance(shared.act(shared.begin(), "odd-detail"), Answered)


def test_a_coroutine_that_takes_too_long_costs_its_own_episode_alone(player):
    pool = player(timeout_s=1.5)
    other, late = pool.begin(), pool.begin()
    process = pool.act(other, "pid").observation
    reply = pool.act(late, "wait")
    assert (reply.timed_out, reply.detail) == (True, "no answer within 1.5 s")
    assert pool.act(other, "pid").observation == process


def test_many_episodes_wait_beside_each_other(shared):
    pool = shared
    episodes = [pool.begin() for _ in range(40)]
    began = time.monotonic()
    for episode in episodes:
        pool.pool.act(episode, "short", pool.replies.put)
    assert {pool.wait().observation for _ in episodes} == {"awake"}
    assert time.monotonic() - began < 40 * 0.2 / 2


def test_a_process_that_hangs_or_dies_is_replaced_and_its_episodes_fail(player, monkeypatch):
    end = WorkerProcess.end
    # On a busy machine a process that ends takes longer for it than its exit code is waited for.
    monkeypatch.setattr(WorkerProcess, "end", lambda line, grace_s: end(line, 20.0 if grace_s else 0.0))
    for text, timed_out, detail in [
        ("hang", True, "no answer within 1.5 s"),
        ("exit", False, "the process of this episode ended while it had its turn (exit code 3)"),
    ]:
        pool = player(timeout_s=1.5)
        other, bad = pool.begin(), pool.begin()
        before = pool.act(other, "pid").observation
        reply = pool.act(bad, text)
        assert isinstance(reply, Failed)
        assert reply.timed_out is timed_out
        assert not reply.is_lost
        assert detail in reply.detail
        lost = pool.act(other, "turns")
        assert isinstance(lost, Failed)
        assert lost.is_lost
        assert lost.detail == "lost with its process, which ended because of other episodes"
        assert pool.act(pool.begin(), "pid").observation not in (before, str(os.getpid()))


def test_who_waits_where_others_hang_is_lost_and_not_late(player):
    """Of two that wait when a worker is ended, the one that had its turn has failed."""
    pool = player(timeout_s=1.5)
    first, second = pool.begin(), pool.begin()
    replies = {}
    pool.pool.act(first, "hang", lambda reply: replies.setdefault("first", reply))
    pool.pool.act(second, "turns", lambda reply: replies.setdefault("second", reply))
    end = time.monotonic() + 20
    while len(replies) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert (replies["first"].timed_out, replies["first"].is_lost) == (True, False)
    assert (replies["second"].timed_out, replies["second"].is_lost) == (False, True)


def test_another_worker_goes_on(player):
    pool = player(workers=2)
    first, second = pool.begin(), pool.begin()
    pids = [pool.act(each, "pid").observation for each in (first, second)]
    assert len(set(pids)) == 2
    assert isinstance(pool.act(first, "exit"), Failed)
    assert pool.act(second, "pid").observation == pids[1]


def test_an_episode_is_closed_once_even_in_the_middle_of_an_answer(player, tmp_path):
    pool = player(folder=str(tmp_path))
    done, waiting = pool.begin("done"), pool.begin("waiting")
    pool.act(done, "turns")
    pool.pool.act(waiting, "wait", pool.replies.put)
    for episode in (done, waiting, done):
        pool.pool.forget(episode)
    pool.begin()  # answered after the others were closed, or while they are
    end = time.monotonic() + 10
    while {path.name for path in tmp_path.iterdir()} != {"done-1", "waiting-1"}:
        assert time.monotonic() < end
        time.sleep(0.02)


def hang(pool, number):
    """Let calls hang in threads, and give their episodes up."""
    episodes = [pool.begin() for _ in range(number)]
    for episode in episodes:
        pool.pool.act(episode, "thread 1000", pool.replies.put)
    assert all(pool.wait().timed_out for _ in episodes)
    for episode in episodes:
        pool.pool.forget(episode)


def test_a_worker_in_which_too_many_threads_hang_is_replaced(player, capfd):
    pool = player(timeout_s=1.5)
    good, _ = pool.begin(), pool.begin("slow")  # which leaves time to ask while the worker ends
    process = pool.act(good, "pid").observation
    hang(pool, 9)
    end = time.monotonic() + 10
    while isinstance(lost := pool.act(good, "turns"), Answered):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert lost.is_lost
    assert pool.act(pool.begin(), "pid").observation != process
    assert "9 episodes go on 1.5 s after they were closed" in capfd.readouterr().err


def test_all_episodes_are_closed_at_the_end_whatever_they_do(player, tmp_path):
    pool = player(workers=2, folder=str(tmp_path))
    names = ["idle", "slow", "waiting", "forgotten"]
    episodes = {name: pool.begin(name) for name in names}
    pool.pool.act(episodes["waiting"], "wait", pool.replies.put)
    pool.pool.forget(episodes["forgotten"])
    pool.pool.close()
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == set(names)


def test_what_cannot_be_loaded_is_told_by_check():
    pool = EnvironmentPool(EnvironmentConfig(plugin="nobody-has-it"), seed=0)
    pool.start()
    try:
        end = time.monotonic() + 30
        while pool._thread._error is None and time.monotonic() < end:
            time.sleep(0.05)
        with pytest.raises(PluginError, match="nobody-has-it"):
            pool.check()
    finally:
        pool.close()
