"""Harm that is done to the processes of a run, drawn from a seed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias, get_args

import attrs
import psutil

from tests.following import Following

Kind: TypeAlias = Literal["kill", "pause", "hang"]

CONTROLLER: Final = "controller"
FORK_SERVER: Final = "fork server"
Role: TypeAlias = Literal["controller", "policy", "rollout", "fork server"]


@attrs.frozen(kw_only=True)
class Harm:
    """What is done to a process.

    Attributes:
        after_s: Seconds after the one before.
        role: Whose process. The fork server is only killed, and all that it has forked with it.
        draw: Which of those that are there, as a share of them.
        kind: `kill` ends it, `pause` stops it for a while, `hang` stops it for good.
        pause_s: How long it is stopped.
    """

    after_s: float
    role: Role
    draw: float
    kind: Kind
    pause_s: float

    def __str__(self) -> str:
        lasting = f" for {self.pause_s:.1f} s" if self.kind == "pause" else ""
        return f"{self.kind} a {self.role}{lasting}"


def is_enough(done: Sequence[Harm], number: int) -> bool:
    """Whether so many harms were done, to each role, and one of them was a hang."""
    roles, kinds = {harm.role for harm in done}, {harm.kind for harm in done}
    return len(done) >= number and roles == set(get_args(Role)) and "hang" in kinds


def harms(seed: int) -> Iterator[Harm]:
    """An endless sequence of them, the same for the same seed."""
    draw = random.Random(seed)
    while True:
        role = draw.choices(get_args(Role), (5, 7, 7, 1))[0]
        yield Harm(
            after_s=draw.uniform(0.5, 3.5),
            role=role,
            draw=draw.random(),
            kind="kill" if role == FORK_SERVER else draw.choices(("kill", "pause", "hang"), (6, 2, 1))[0],
            pause_s=draw.uniform(0.2, 2.0),
        )


class Harmer:
    """Does harm to a run, and lets go of what it has stopped.

    Args:
        following: The run.
        sequence: What to do.

    Attributes:
        done: What was done: (unix time, to whom, what).
    """

    def __init__(self, following: Following, sequence: Iterator[Harm]) -> None:
        self.done: Final[list[tuple[float, str, Harm]]] = []
        self._following: Final = following
        self._sequence: Final = sequence
        self._next = next(sequence)
        self._due = time.monotonic() + self._next.after_s
        self._stopped: Final[list[tuple[float, int]]] = []

    @property
    def harms(self) -> list[Harm]:
        """What was done, without when and to whom."""
        return [harm for _, _, harm in self.done]

    def turn(self) -> bool:
        """Do what is due, if there is somebody to do it to; whether something was done."""
        now = time.monotonic()
        for until, pid in [each for each in self._stopped if each[0] <= now]:
            self._stopped.remove((until, pid))
            _signal(pid, signal.SIGCONT)
        name = self._victim() if now >= self._due else None
        if name is None:
            return False
        harm, pid = self._next, self._following.pid(name)
        if not _signal(pid, signal.SIGKILL if harm.kind == "kill" else signal.SIGSTOP):
            return False
        if harm.kind == "pause":
            self._stopped.append((now + harm.pause_s, pid))
        self.done.append((time.time(), name, harm))
        self._next = next(self._sequence)
        self._due = now + self._next.after_s
        return True

    def let_go(self) -> None:
        """Stop pausing."""
        for _, pid in self._stopped:
            _signal(pid, signal.SIGCONT)

    def _victim(self) -> str | None:
        if self._next.role in (CONTROLLER, FORK_SERVER):
            return self._next.role
        state = self._following.state
        names = [replica.name for replica in state.named(self._next.role)] if state is not None else []
        return names[int(self._next.draw * len(names))] if names else None


def _signal(pid: int, number: signal.Signals) -> bool:
    """Signal a process, which may be gone by now; whether it was there."""
    if not pid:
        return False
    try:
        is_there = psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        os.kill(pid, number)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
    return is_there
