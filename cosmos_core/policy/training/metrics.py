"""Metrics of a step: sums and maxima on each replica, merged over the group, then averaged.

What travels between replicas is JSON, so that members need not have seen the same quantities.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Self

import attrs
import torch
import torch.distributed as dist

from cosmos_core.errors import TrainingError
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.training.microbatch import Known
from cosmos_core.protocols import Decided, Loss, Model
from cosmos_core.protocols.algorithm import Estimate, is_core_metric
from cosmos_core.protocols.layout import Axis, Mesh
from cosmos_core.protocols.model import MoEModel
from cosmos_core.protocols.objectives import log_ratio
from cosmos_core.replica.profiler import span


@attrs.define
class Meter:
    """Accumulates a step's quantities.

    Attributes:
        sums: Totals over decisions or replicas.
        counts: How many values each sum is of, where it is to be averaged.
        maxima: Largest values.
    """

    sums: dict[str, float] = attrs.field(factory=dict)
    counts: dict[str, int] = attrs.field(factory=dict)
    maxima: dict[str, float] = attrs.field(factory=dict)

    def add(self, name: str, total: float, count: int = 0) -> None:
        """Add to a sum; with a count, it is reported as a mean."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        if count:
            self.counts[name] = self.counts.get(name, 0) + count

    def peak(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self.maxima[name] = max(self.maxima.get(name, value), value)

    def merge(self, other: Meter) -> None:
        """Take in another replica's quantities."""
        for name, total in other.sums.items():
            self.add(name, total, other.counts.get(name, 0))
        for name, value in other.maxima.items():
            self.peak(name, value)

    def report(self) -> dict[str, float]:
        """Means, sums and maxima by name."""
        means = {name: total / self.counts.get(name, 1) for name, total in self.sums.items()}
        return means | self.maxima

    def encode(self) -> bytes:
        """Encode as JSON; not-a-number and infinities survive."""
        return json.dumps([self.sums, self.counts, self.maxima]).encode()

    @classmethod
    def merged(cls, encoded: Iterable[bytes]) -> Self:
        """Merge what `encode` made on each replica."""
        meter = cls()
        for data in encoded:
            meter.merge(Meter(*json.loads(data)))
        return meter


class Stopwatch:
    """Seconds spent in named parts of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`, which it has in traces, too."""
        start = time.perf_counter()
        try:
            with span(name.removesuffix("_s")):
                yield
        finally:
            if self._device.type == "cuda":
                # Not the whole device: copies go on beside the step.
                torch.cuda.current_stream(self._device).synchronize()
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


IMITATION: Final = "imitation_"
"""Prefix of the metrics of demonstrations beside rollouts."""


class Measures:
    """Accumulates over micro-batches, without waiting for the device.

    Args:
        prefix: How the names of its quantities begin.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix: Final = prefix
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, torch.Tensor | int] = {}
        self._max_log_ratio = torch.zeros(())

    def take(self, total: torch.Tensor, decided: Decided, loss: Loss, known: Known, *, version: int | None) -> None:
        """Take in a micro-batch.

        Args:
            total: Its part of the batch's loss.
            decided: What its forward gave.
            loss: What the algorithm made of it, with its own metrics.
            known: What was known before.
            version: Weight version that the forward used; None where no engine had these weights.

        Raises:
            TrainingError: The algorithm gave a metric one of the core's names.
        """
        number = len(known.weights_N)
        self._add("loss", total, 0)
        for name, values_N in loss.metrics.items():
            _check_name(name)
            self._add(name, values_N.detach().sum(), number)
        if decided.entropy_N is not None:
            self._add("entropy", decided.entropy_N.sum(), number)
        if known.has_behaviour and number:
            self._compare(decided.logprobs_N.detach(), known, version)

    def take_estimates(self, estimates: Sequence[Estimate]) -> None:
        """Take in what the algorithm made of sequences.

        Raises:
            TrainingError: See `take`.
        """
        for estimate in estimates:
            for name, value in estimate.metrics.items():
                _check_name(name)
                self._add(name, torch.tensor(value), 1)

    def meter(self) -> Meter:
        """The step's quantities on this replica, moved to the CPU in one go."""
        meter = Meter()
        if not self._sums:
            return meter
        # Estimates are numbers: only a loss says where the decisions are.
        device = self._sums.get("loss", self._max_log_ratio).device
        counts = (torch.as_tensor(count, device=device) for count in self._counts.values())
        rows = [*self._sums.values(), *counts, self._max_log_ratio.exp()]
        *numbers, max_ratio = torch.stack([row.to(device, torch.float64) for row in rows]).tolist()
        for name, total, count in zip(self._sums, numbers, numbers[len(self._sums) :], strict=False):
            meter.add(self._prefix + name, total, int(count))
        if "mismatch_kl" in meter.counts:
            meter.peak("mismatch_max_ratio", max_ratio)
        else:
            meter.sums.pop("mismatch_kl", None)
        return meter

    def _compare(self, logprobs_N: torch.Tensor, known: Known, version: int | None) -> None:
        """Trainer against engine: log r = log π - log μ, on samples of μ.

        `behaviour_kl` is over all decisions, however old the weights that made them: the k3 estimator r - 1 - log r
        of KL(μ || π). `mismatch_kl` is over those that the engine made with these very weights, so that only numerics
        differ: the k1 estimator -log r. Source: http://joschu.net/blog/kl-approx.html.
        """
        log_ratio_N = logprobs_N - known.behaviour_logprobs_N
        # So that one decision cannot make the mean infinite.
        bounded_N = log_ratio(logprobs_N, known.behaviour_logprobs_N)
        self._add("behaviour_kl", (bounded_N.exp() - 1.0 - bounded_N).sum(), len(log_ratio_N))
        if version is None:
            return
        is_same_N = known.versions_N == version
        same_N = log_ratio_N.where(is_same_N, 0.0)
        self._add("mismatch_kl", -same_N.sum(), is_same_N.sum())
        self._max_log_ratio = torch.maximum(self._max_log_ratio.to(same_N.device), same_N.abs().max())

    def _add(self, name: str, total: torch.Tensor, count: torch.Tensor | int) -> None:
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts.get(name, 0) + count


def _check_name(name: str) -> None:
    if is_core_metric(name):
        raise TrainingError(f"the algorithm reports a metric {name!r}, which the core measures; rename it")


DIFFERENT: Final[tuple[Axis, ...]] = ("dp_replicate", "dp_shard", "cp")
"""Axes whose processes count different things; those of `tp` all count the same."""


class Counters:
    """Counters that a model keeps in a step, summed over all that trained it (see `protocols.model.MoEModel`).

    Args:
        model: The model.
        module: Its weights.
        mesh: The processes of the replica.
        device: Where counts are.
    """

    def __init__(self, model: Model, module: torch.nn.Module, mesh: Mesh, device: torch.device) -> None:
        self._model: Final = model if isinstance(model, MoEModel) else None
        self._module: Final = module
        self._nothing: Final = torch.zeros(0, device=device)
        self._groups: Final = [mesh.group(axis) for axis in DIFFERENT if mesh.size(axis) > 1]

    def zero(self) -> None:
        """Forget what was counted."""
        for counter in self._tensors():
            counter.zero_()

    def sum(self, group: GradientGroup) -> None:
        """Add up what was counted over the replica's processes and over all replicas.

        Raises:
            GradientGroupError: The group broke.
        """
        if self._model is None:
            return
        counters = self._tensors()
        # A stage of a pipeline that counts nothing takes part all the same: its replica agrees on every sum.
        flat = torch.cat([counter.flatten() for counter in counters]) if counters else self._nothing
        for each in self._groups:
            dist.all_reduce(flat, group=each)
        group.sum(flat)
        for counter, part in zip(counters, torch.split(flat, [counter.numel() for counter in counters]), strict=True):
            counter.copy_(part.view_as(counter))

    def act(self) -> Mapping[str, float]:
        """Let the model act on the sums; its metrics."""
        return {} if self._model is None else self._model.after_step(self._module)

    def _tensors(self) -> list[torch.Tensor]:
        return [] if self._model is None else list(self._model.counters(self._module))
