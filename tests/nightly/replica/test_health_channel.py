"""Real processes on one health channel that are slow to notice what became of one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.health_worlds import besiege, outputs

PATIENT = """
from cosmos_core.replica import health_channel, health_leader
health_leader._SETTLE_S, health_channel.ANSWER_S, health_channel._FAREWELL_S = 1.0, 10.0, 15.0
"""
"""What came first is found on a busy machine, too."""


def test_a_quiet_life_ends_when_all_have_done_their_work(world):
    members = world("pass", "time.sleep(3)", "pass")
    time.sleep(0.3)
    assert [process.poll() for process in members] == [None] * 3
    assert outputs(members) == ["done"] * 3


def test_the_first_cause_is_told_and_not_its_echoes(world):
    """What breaks in the others' collectives is heard of at once; the error itself, later."""
    echo = PATIENT + "raise RuntimeError('Connection closed by peer')"
    said = outputs(world(echo, echo, PATIENT + "time.sleep(0.01); raise TrainingError('boom')"))
    assert said == ["raised: policy-0 rank 2: boom"] * 2 + ["raised: boom"]


def test_a_frozen_follower(world):
    members = world("stuck()", "stuck()", "stuck()")
    os.kill(members[2].pid, signal.SIGSTOP)
    cause = f"policy-0 rank 2: its process (pid {members[2].pid}) has been silent for 3 s (control.lost_after_s): "
    cause += "stopped, or its machine cannot be reached"
    assert outputs(members[:2], within_s=20.0) == [f"lost: {cause}"] * 2
    # Once it goes on, it finds out, too.
    os.kill(members[2].pid, signal.SIGCONT)
    assert outputs(members[2:], within_s=20.0) == [f"lost: {cause}"]


@pytest.mark.parametrize("after_s", [0.0, 1.2])
def test_a_frozen_leader(world, after_s):
    members = world("stuck()", "stuck()", "stuck()")
    time.sleep(after_s)  # it has heard its followers, and has been frozen hardly longer than they may be silent
    os.kill(members[0].pid, signal.SIGSTOP)
    cause = "policy-0 rank 0: its process, the leader, has been silent for 3 s (control.lost_after_s)"
    assert outputs(members[1:], within_s=20.0) == [f"lost: {cause}"] * 2
    os.kill(members[0].pid, signal.SIGCONT)
    (said,) = outputs(members[:1], within_s=20.0)
    assert "ended without a word" in said


def test_a_killed_follower_whose_end_breaks_the_others_collectives(world):
    code = PATIENT + "time.sleep(0.05); raise RuntimeError('Connection closed by peer')"
    members = world(code, "stuck()", "os.kill(os.getpid(), 9)")
    cause = f"policy-0 rank 2: its process (pid {members[2].pid}) ended without a word: killed, or out of memory?"
    assert outputs(members) == [f"raised lost: {cause}", f"lost: {cause}", ""]


def test_strangers_who_use_up_the_files_do_not_keep_followers_out():
    assert besiege("60", "1000") == "met []\n"
