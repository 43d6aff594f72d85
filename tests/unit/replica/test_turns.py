"""Processes of one role at a time have the GPUs of a machine."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from cosmos_core.config.schema import ControlConfig
from cosmos_core.errors import ConfigError, ProcessLostError
from cosmos_core.replica import turns
from cosmos_core.replica.turns import RoleLock, Turns, role_lock


@pytest.fixture
def held(tmp_path):
    """Locks of two processes of the policy and of two rollout replicas, which wait for nobody."""
    names = {"p": "policy", "q": "policy", "r": "rollout", "s": "rollout"}
    locks = [RoleLock(tmp_path, role, name, interrupted=lambda: True) for name, role in names.items()]
    yield locks
    for lock in locks:
        lock.close()


def test_processes_of_one_role_hold_the_lock_together(held, tmp_path):
    first, second, other, last = held
    first.acquire()
    second.acquire()
    for lock in (other, last):
        with pytest.raises(ProcessLostError, match=r"not asleep: p, q; see their logs"):
            lock.acquire()
    first.release()
    with pytest.raises(ProcessLostError, match=r"not asleep: q;"):
        other.acquire()
    with (
        RoleLock(tmp_path, "policy", "q", interrupted=lambda: True) as again,
        pytest.raises(ProcessLostError, match=r"not asleep: q;"),
    ):
        again.acquire()
    second.close()  # as the kernel does when its process is killed
    other.acquire()
    last.acquire()
    with pytest.raises(ProcessLostError, match=r"not asleep: r, s;"):
        first.acquire()


def test_processes_of_one_replica_hold_it_together_or_not_at_all(held):
    first, _, other, _ = held
    first._agree = lambda _: False  # another one does not get it, on its machine
    with pytest.raises(ProcessLostError, match="others of this replica, on other machines"):
        first.acquire()
    other.acquire()


def test_who_waits_for_the_first_time_waits_for_ever_and_tells_for_whom(tmp_path, monkeypatch, caplog):
    """With those who take turns it gets in between two of them."""
    monkeypatch.setattr(turns, "_TELL_S", 0.1)
    monkeypatch.setattr(turns, "directories_for_files", lambda: (tmp_path,))
    caplog.set_level("INFO")
    control = ControlConfig(progress_timeout_s=0.2, join_timeout_s=0.1)
    job = SimpleNamespace(run_id="run", takes_turns=True, recipe=SimpleNamespace(control=control))
    stop, has_begun = threading.Event(), threading.Event()

    def args(name):
        return SimpleNamespace(job=job, role=name.rstrip("0123456789"), name=name, stop=stop)

    def take_turns():
        with role_lock(args("rollout0")) as rollout:
            rollout.patience_s = 20.0
            has_begun.set()
            while "not asleep: rollout0" not in caplog.text:
                time.sleep(0.02)
            rollout.release()
            with role_lock(args("policy0")) as policy:
                policy.patience_s = 20.0
                policy.release()
                turn = itertools.cycle((rollout, policy))
                while not stop.wait(0.02):
                    with released(next(turn)):
                        stop.wait(0.1)

    @contextlib.contextmanager
    def released(lock):
        lock.acquire()
        yield
        lock.release()

    thread = threading.Thread(target=take_turns)
    thread.start()
    assert has_begun.wait(20)
    with role_lock(args("policy1")) as joined:
        assert "waiting for shared GPUs" in caplog.text
        assert joined.patience_s == 0.2
        stop.set()
        thread.join(20)
        (folder,) = tmp_path.iterdir()
        with RoleLock(folder, "rollout", "rollout1") as late:
            late.patience_s = 0.2
            with pytest.raises(ProcessLostError, match="for too long; not asleep: policy1"):
                late.acquire()
    assert [*tmp_path.iterdir()] == []


def test_a_machine_without_locks_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(turns, "directories_for_files", lambda: (tmp_path / "file",))
    args = SimpleNamespace(job=SimpleNamespace(run_id="run", takes_turns=True, recipe=SimpleNamespace(control=None)))
    with pytest.raises(ConfigError, match=r"file cannot be made and locked: .*Not a directory"), role_lock(args):
        pass


def test_a_process_sleeps_and_wakes_as_it_is_told_and_says_so_once_a_turn(held):
    lock, _, other, _ = held
    did = []
    lock.acquire()
    turns = Turns(lock, sleep=lambda: did.append("sleep"), wake=lambda: did.append("wake"))
    assert turns.is_asleep
    other.acquire()
    assert [turns.follow(turn, sleep=True) for turn in (0, 0, 2)] == [True, False, True]
    other.release()
    assert not turns.follow(3, sleep=False)
    assert not turns.follow(3, sleep=False)
    assert turns.follow(4, sleep=True)
    assert did == ["sleep", "wake", "sleep"]
    assert turns.gauges()["asleep_s"] > 0.0
