"""Watching a run from a test as its supervisor does, and doing harm to its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from cosmos_core.config.loading import load_job
from cosmos_core.control.journal import entries
from cosmos_core.control.machine.events import Event
from cosmos_core.control.machine.state import State
from cosmos_core.run.follower import Follower
from cosmos_core.run.observer import Observer
from cosmos_core.transport.keys import person_key


class Following:
    """A run that goes on, seen through its controller; a context manager.

    Args:
        run: The run's folder.
        process: `cosmos run`, whose output is shown should it end too early.
    """

    def __init__(self, run: Path, process: subprocess.Popen[str]) -> None:
        self.run = run
        self.process = process
        self.follower = Follower()

    def __enter__(self) -> Self:
        deadline = time.monotonic() + 180
        while not (self.run / "controller.json").exists():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the controller has not come"
            time.sleep(0.05)
        job = load_job(self.run)
        self.observer = Observer(self.controller["address"], job.run_id, person_key(job.keys))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.observer.close()

    @property
    def controller(self) -> dict[str, str | int]:
        """What the controller that came last wrote: address, pid and term."""
        return json.loads((self.run / "controller.json").read_text())

    @property
    def state(self) -> State | None:
        """The newest state that is known."""
        return self.follower.state

    def look(self) -> None:
        """Take in what has happened, for a moment."""
        self.follower.fold(self.observer.poll(0.05))

    def until(self, condition: Callable[[State], bool], within_s: float = 180.0) -> float:
        """Wait for the run to come to something; how long that took, in seconds."""
        began = time.monotonic()
        while self.state is None or not condition(self.state):
            if self.process.poll() is not None:
                # The controller may have ended before it said the last of it, which is in its journal.
                self.follower = Follower()
                self.follower.fold(entries(self.run / "journal.sqlite"))
                assert condition(self.state), self.process.communicate()[0]
                break
            assert time.monotonic() - began < within_s, f"not within {within_s} s: {describe(self.state)}"
            self.look()
        return time.monotonic() - began

    def steps(self, number: int, within_s: float = 180.0) -> float:
        """Wait for so many more steps; how long that took, in seconds."""
        wanted = (self.state.step if self.state else 0) + number
        return self.until(lambda state: state.step >= wanted, within_s)

    def pid(self, name: str) -> int:
        """The process of a replica, of the controller, or of the fork server."""
        if name == "controller":
            return int(self.controller["pid"])
        if name == "fork server":
            children = psutil.Process(self.process.pid).children()
            return next((each.pid for each in children if "multiprocessing.forkserver" in " ".join(each.cmdline())), 0)
        assert self.state is not None
        return self.state.replicas[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a process."""
        os.kill(self.pid(name), number)

    def is_back(self, name: str, incarnation: str) -> Callable[[State], bool]:
        """Whether a replica is there in another process."""
        return lambda state: name in state.replicas and state.replicas[name].incarnation != incarnation

    def incarnation(self, name: str) -> str:
        """The process of a replica, as the controller tells it from others."""
        assert self.state is not None
        return self.state.replicas[name].incarnation


def describe(state: State | None) -> str:
    """A state, for whoever reads a failure."""
    if state is None:
        return "nothing is known of the run"
    return f"term {state.term}, step {state.step}, replicas {sorted(state.replicas)}, {state.outcome} {state.reason}"


def history(run: Path) -> list[tuple[float, Event]]:
    """Everything that happened to a run that has ended: (unix time, event)."""
    return [(when, event) for _, when, event in entries(run / "journal.sqlite")]


def step_times(run: Path) -> list[float]:
    """Unix time of each step's end."""
    follower = Follower()
    follower.fold(entries(run / "journal.sqlite"))
    return [timed.time for timed in follower.steps]
