"""Traces the steps of a process for Perfetto, once a person has asked for it; before that, nothing is recorded."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cosmos_core.transport.directives import ProfileOrder
from cosmos_core.transport.reports import Profiled


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """A range of the trace, where this thread is being traced."""
    is_traced = torch.autograd._profiler_enabled()  # type: ignore[attr-defined] # noqa: SLF001 - it has no other name
    return record_function(name) if is_traced else contextlib.nullcontext()


class Profiler:
    """Traces steps of one thread, which alone calls its methods.

    Args:
        directory: The run's folder.
        replica: Name of the replica.
        tell: Takes what came of an order.
        rank: This process's, of those of the replica, each of which has a profiler and makes the same steps.
        exchange: Gives the words of all of them for those of each.
        untraced: What no trace has, in words; empty if nothing is lacking.

    Attributes:
        order: The newest; set by any thread.
    """

    def __init__(
        self,
        directory: Path,
        replica: str,
        tell: Callable[[Profiled], None],
        *,
        rank: int = 0,
        exchange: Callable[[bytes], Sequence[bytes]] = lambda words: (words,),
        untraced: str = "",
    ) -> None:
        self._directory: Final = directory
        self._replica: Final = replica
        self._tell: Final = tell
        self._rank: Final = rank
        self._exchange: Final = exchange
        self._untraced: Final = untraced
        self.order: ProfileOrder | None = None
        self._going: ProfileOrder | None = None
        self._ended = ""
        self._left = 0
        self._profile: profile | None = None
        self._problem = ""

    def step(self, number: float = math.inf) -> contextlib.AbstractContextManager[object]:
        """A step of this number, traced if it is one of those that were ordered."""
        order = self._going or self.order
        if order is None or order.ident == self._ended or number < order.first:
            return contextlib.nullcontext()
        return self._traced(order)

    def repeat(self) -> None:
        """Let another attempt at the present step count in its place; one that raises never counts."""
        self._left += 1

    def finish(self, problem: str = "it ended, or was told to, before it had done so many steps") -> None:
        """Write what was traced of the order, if one is not done, and tell."""
        order, traced = self._going or self.order, self._profile
        if order is None or order.ident == self._ended:
            return
        self._going, self._ended, self._profile = None, order.ident, None
        problem, self._problem = self._problem or problem or self._untraced, ""
        place = f"profiles/step-{order.first}-{order.ident[:8]}/{self._replica}-rank-{self._rank}.json.gz"
        try:
            if traced is not None:
                _write(traced, self._directory / place)
        # A profiler is no reason to lose a run.
        except Exception as error:  # noqa: BLE001
            traced, problem = None, f"the trace of rank {self._rank} could not be written: {error}"
        own = ["" if traced is None else place, problem]
        traces, problems = zip(*map(json.loads, self._exchange(json.dumps(own).encode())), strict=True)
        self._tell(Profiled(ident=order.ident, traces=tuple(filter(None, traces)), problem=max(problems)))

    @contextlib.contextmanager
    def _traced(self, order: ProfileOrder) -> Iterator[None]:
        if self._going is None:
            self._begin(order)
        yield
        self._left -= 1
        if self._left <= 0:
            self.finish("")

    def _begin(self, order: ProfileOrder) -> None:
        self._going, self._left = order, order.steps
        if self._rank not in order.ranks:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # Of torch 2.11; nothing is repeated, and `acc_events`, which keeps them, takes longer than to write the trace.
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        traced = profile(activities=activities)
        try:
            traced.start()
        except Exception as error:  # noqa: BLE001 - as above: another profiler may hold the device
            self._problem = f"the profiler of rank {self._rank} does not start: {error}"
        else:
            self._profile = traced


def _write(traced: profile, path: Path) -> None:
    traced.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")
    traced.export_chrome_trace(str(part))
    part.rename(path)
