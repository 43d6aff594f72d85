"""A search for the seeds that show a bug: whether one is found, by which oracle, and after how many seeds."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

import attrs

from tests.simulation.simulator import Simulation, Violation

_LONGEST_S = 20.0
"""Of CPU, of one run: most take a tenth of a second, and one that does not end is found, too."""


@attrs.frozen
class Finding:
    """A seed that shows a bug.

    Attributes:
        seed: The first that does.
        oracle: What tells of it; `no end` where the program runs for ever, `error` where it fails.
    """

    seed: int
    oracle: str


def search(bug: AbstractContextManager[None], seeds: Iterable[int]) -> Finding | None:
    """Run seeds with a bug in the program until one shows it; None if none does."""
    with bug, _silence():
        for seed in seeds:
            if oracle := _violated(seed):
                return Finding(seed, oracle)
    return None


def _violated(seed: int) -> str:
    try:
        with _limit(_LONGEST_S):
            Simulation(seed).run()
    except Violation as violation:
        return violation.oracle
    except TimeoutError:
        return "no end"
    except Exception:  # noqa: BLE001 - whatever a bug comes to
        return "error"
    return ""


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The controller warns of whom it loses; here that is the point."""
    log = logging.getLogger("cosmos_core")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
