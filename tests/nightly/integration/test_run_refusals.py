"""A replica whose key is revoked is not started again: the run goes on with who is left, and says so."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from cosmos_core.control.machine.events import ReplicaJoined, ReplicaLost
from tests.commandline import CommandLine
from tests.following import Following, history

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = (
    "warmup.steps=1",
    "run.steps=100000",
    "evaluation.prompts=0",
    "policy.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.replicas=2",
    "control.join_timeout_s=600",
)


def test_who_is_shut_out_is_done_without(cosmos: CommandLine, arithmetic: Callable[..., list[str]]) -> None:
    run, keys = cosmos.folder / "runs" / "shut", cosmos.folder / "keys"
    names = [word for name in ("rollout-0", "rollout-1") for word in ("--rollout", name)]
    cosmos("keys", "new", "keys", "--policy", "policy-*", *names, "--person", "ann")
    process = cosmos.start("run", *arithmetic("shut", *QUICK, f'control.keys="{keys}"'))
    with Following(run, process) as following:
        following.until(lambda state: state.has_rollouts)
        following.steps(2)
        said = cosmos("keys", "revoke", "keys", "rollout-1")
        assert "not started again" in said
        following.until(lambda state: "rollout-1" not in state.replicas)
        following.steps(5)
        shown = cosmos("status", "runs/shut")
        assert "  rollout-1: its key was revoked" in shown
        cosmos("keys", "revoke", "keys", "rollout-0")
        following.until(lambda state: not state.members["rollout"])
        # The run waits for somebody; a person lets one in.
        cosmos("keys", "allow", "keys", "rollout-1")
        back = cosmos.start("replica", "rollout", "--run", "runs/shut", "--name", "rollout-1")
        following.until(lambda state: "rollout-1" in state.replicas)
        following.steps(2)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
        told = back.communicate(timeout=30)[0]
    assert process.returncode == 130, output
    assert back.returncode == 0, told
    for name in ("rollout-0", "rollout-1"):
        # Who has ended before the controller's word was heard says so itself.
        why = rf"{name}(?:: its key was revoked| ended: .*); its key {name} was revoked .*; {name} is not started again"
        assert re.search(why, output)
        assert output.count(f"{name} is not started again, the run goes on without it") == 1
    assert output.count("no rollout replica is left: the run fails unless one joins within") == 1
    assert output.count("rollout-1 has joined") == 1
    happened = [event for _, event in history(run)]
    assert [event.name for event in happened if isinstance(event, ReplicaJoined)].count("rollout-0") == 1
    lost = [(event.name, event.reason) for event in happened if isinstance(event, ReplicaLost)]
    assert lost == [("rollout-1", "its key was revoked"), ("rollout-0", "its key was revoked")]
