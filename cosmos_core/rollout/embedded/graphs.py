"""Decode steps as CUDA graphs: one replay in place of the launches of a whole forward and its draws.

A graph is of a number of rows, so there is one for each size of `sizes`; rows above those that are real are padding.
They attend to one unit of their own, and what they draw is written nowhere.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from cosmos_core.rollout.embedded.paged import PagedCache, PagedStep
from cosmos_core.rollout.embedded.runner import Runner
from cosmos_core.rollout.embedded.sampler import SamplingFeatures, SlotNumbers, draw_next

_LOG: Final = logging.getLogger(__name__)

Compute: TypeAlias = Callable[[], torch.Tensor]
Graph: TypeAlias = tuple[Callable[[], None], torch.Tensor]
"""A replay, and the tensor that it fills."""


class CudaCapture:
    """Captures on a stream of its own, all in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        # Never another one: torch hands 32 out in turn, some of which others use, and keeps a workspace for each.
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.renew()

    def renew(self) -> None:
        """Take another pool: that of graphs which are gone takes no new ones."""
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, compute: Compute) -> torch.Tensor:
        """Call it so that a capture finds made what is made once; its result is to be used."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = compute()
        here.wait_stream(self._stream)
        return result

    def capture(self, compute: Compute) -> Graph:
        """Capture it: nothing is computed yet. Other threads may go on with the device.

        Raises:
            RuntimeError: The function does what cannot be recorded, such as wait for the device.
        """
        graph: Any = torch.cuda.CUDAGraph()
        # The outer context brings the stream before back if the inner one fails.
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            result = compute()
        return graph.replay, result


CAPTURES: Final[dict[str, Callable[[torch.device], CudaCapture]]] = {"cuda": CudaCapture}
"""Ways to capture, by types of devices."""


def sizes(most: int) -> list[int]:
    """Numbers of rows that there are graphs of: 1, 2, 4, 8, then multiples of 16, and `most`."""
    return [*(size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most), most]


class DecodeGraphs:
    """Graphs of steps in which slots 0 to n - 1 decode, made as they are needed.

    They read the cache, its table, the slots' numbers and the weights where these lie. Once the cache lies elsewhere
    they are made anew.

    Attributes:
        refusal: Why a step could not be captured; none is from then on.
    """

    def __init__(self, runner: Runner, cache: PagedCache, numbers: SlotNumbers, num_slots: int) -> None:
        self._runner, self._cache, self._numbers = runner, cache, numbers
        self._sizes = sizes(num_slots)
        self._capture = CAPTURES[cache.table.device.type](cache.table.device)
        self._num = torch.zeros(1, dtype=torch.int64, device=cache.table.device)
        self.refusal = ""
        self.drop()

    def drop(self) -> None:
        """Forget all graphs, and give their memory back."""
        self._graphs: dict[tuple[int, SamplingFeatures], Graph] = {}
        self._capture.renew()
        self._generation = self._cache.generation

    def step(self, num: int, features: SamplingFeatures) -> torch.Tensor:
        """Tokens that the first `num` slots draw, and log-probs, float64 [2, `num` or more]."""
        if self._generation != self._cache.generation:
            self.drop()
        size = next(size for size in self._sizes if size >= num)
        self._num.fill_(num)
        if (size, features) in self._graphs:
            replay, drawn = self._graphs[size, features]
            replay()
            return drawn
        compute = functools.partial(self._decode, size, features)
        drawn = self._capture.warm_up(compute)
        try:
            self._graphs[size, features] = self._capture.capture(compute)
        except RuntimeError as error:
            self.drop()
            self.refusal = str(error).strip().partition("\n")[0] or type(error).__name__
            _LOG.warning(
                "a step of %d sequences cannot be captured as a CUDA graph: %s; from here on steps are launched kernel "
                "by kernel (rollout.engine.options.cuda_graphs = false tries no capture)",
                num,
                self.refusal,
            )
        return drawn

    def _decode(self, size: int, features: SamplingFeatures) -> torch.Tensor:
        slots_R = self._numbers.places[:size]
        is_real_R = slots_R < self._num
        tokens_R, places_R, positions_R = self._numbers.feed(size)
        # The table leads rows of padding, at place 0, to the page that is nobody's.
        step = PagedStep(self._cache, slots_N=slots_R, places_N=places_R * is_real_R)
        logits_RV = self._runner.forward(tokens_R, positions_R, step, None)
        return draw_next(logits_RV, self._numbers, features, is_real_R)
