"""Environments that hang in threads, or in the middle of their end."""

from __future__ import annotations

import time

from cosmos_core.rollout.episodes.messages import Answered, Failed
from cosmos_core.rollout.workers.process import WorkerProcess
from tests.unit.rollout.episodes.test_environment_pool import hang


def test_an_answer_that_waits_when_too_many_threads_hang_is_lost(player):
    pool = player(timeout_s=1.5)
    good = pool.begin()
    hang(pool, 9)
    end = time.monotonic() + 10
    while isinstance(lost := pool.act(good, "short"), Answered):
        assert time.monotonic() < end
    assert lost.is_lost


def test_threads_that_hang_take_none_from_others(player):
    pool = player(timeout_s=3.0)
    good = pool.begin()
    process = pool.act(good, "pid").observation
    stuck = [pool.begin() for _ in range(8)]
    for episode in stuck:
        pool.pool.act(episode, "thread 1000", lambda reply: None)
        pool.pool.forget(episode)
    forgotten = time.monotonic()
    # As many at once again as would find no thread left.
    episodes = [pool.begin() for _ in range(40)]
    for episode in episodes:
        pool.pool.act(episode, "thread 0.02", pool.replies.put)
    assert {pool.wait().observation for _ in episodes} == {"slept"}
    time.sleep(max(0.0, forgotten + 3.2 - time.monotonic()))  # until those that hang are counted
    assert pool.act(good, "pid").observation == process


def test_what_ends_late_after_its_episode_counts_no_more(player):
    pool = player(timeout_s=1.0)
    good = pool.begin()
    process = pool.act(good, "pid").observation
    for _ in range(2):
        episodes = [pool.begin() for _ in range(6)]
        for episode in episodes:
            pool.pool.act(episode, "thread 1.6", pool.replies.put)
        assert all(pool.wait().timed_out for _ in episodes)
        for episode in episodes:
            pool.pool.forget(episode)
        time.sleep(1.6)
    assert pool.act(good, "pid").observation == process


def test_an_episode_that_cannot_be_closed_does_not_hold_up_the_end(player, tmp_path):
    pool = player(folder=str(tmp_path))
    pool.begin("stay")
    pool.begin("quick")
    process = pool.pool._workers[0]._process
    began = time.monotonic()
    pool.pool.close()
    assert time.monotonic() - began < 6
    assert process.returncode is not None
    assert [path.name for path in tmp_path.iterdir()] == ["quick-0"]


def test_a_process_that_leaves_or_closes_its_socket_is_replaced(player, monkeypatch):
    end = WorkerProcess.end
    monkeypatch.setattr(WorkerProcess, "end", lambda line, grace_s: end(line, 20.0 if grace_s else 0.0))
    for text, detail in (
        ("leave", "the process of this episode ended while it had its turn (exit code 5)"),
        ("closed", "the process of this episode ended while it had its turn"),
    ):
        pool = player()
        reply = pool.act(pool.begin(), text)
        assert isinstance(reply, Failed)
        assert detail in reply.detail
        assert isinstance(pool.act(pool.begin(), "turns"), Answered)
