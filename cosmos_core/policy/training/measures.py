"""What a step measures of its decisions, kept on the device until the step's end.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from cosmos_core.errors import TrainingError
from cosmos_core.policy.training.meter import Meter
from cosmos_core.policy.training.objective import Known
from cosmos_core.protocols import Decided, Estimate, Loss, is_core_metric, log_ratio

IMITATION: Final = "imitation_"
"""How names of what is measured of demonstrations beside rollouts begin."""


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
