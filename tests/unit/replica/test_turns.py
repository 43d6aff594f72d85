"""Processes of one role at a time have the GPUs of a machine."""

import pytest

from cosmos_core.errors import ReplicaError
from cosmos_core.replica.turns import RoleLock, Turns


def never():
    return False


@pytest.fixture
def held(tmp_path):
    """Locks of two processes of the policy and of two rollout replicas."""
    locks = [RoleLock(tmp_path / "locks", role) for role in ("policy", "policy", "rollout", "rollout")]
    yield locks
    for lock in locks:
        lock.close()


def test_processes_of_one_role_hold_the_lock_together(held):
    first, second, other, last = held
    first.acquire(never)
    second.acquire(never)
    for lock in (other, last):
        with pytest.raises(ReplicaError, match=r"the other pool has not gone to sleep .*policy@.*lock"):
            lock.acquire(lambda: True)
    first.release()
    with pytest.raises(ReplicaError):
        other.acquire(lambda: True)
    second.close()  # as the kernel does when its process is killed
    other.acquire(never)
    last.acquire(never)
    with pytest.raises(ReplicaError, match=r"rollout@.*\.lock"):
        first.acquire(lambda: True)


def test_a_process_sleeps_and_wakes_as_it_is_told_and_says_so_once_a_turn(held):
    lock, _, other, _ = held
    did = []
    lock.acquire(never)
    turns = Turns(lock, sleep=lambda: did.append("sleep"), wake=lambda: did.append("wake"), interrupted=never)
    assert turns.is_asleep
    other.acquire(never)
    assert [turns.follow(turn, sleep=True) for turn in (0, 0, 2)] == [True, False, True]
    other.release()
    assert not turns.follow(3, sleep=False)
    assert not turns.follow(3, sleep=False)
    assert turns.follow(4, sleep=True)
    assert did == ["sleep", "wake", "sleep"]
    assert turns.gauges()["asleep_s"] > 0.0
