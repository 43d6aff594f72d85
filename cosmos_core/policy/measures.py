"""What a step measures of its decisions, kept on the device until the step's end.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

import torch

from cosmos_core.policy.meter import Meter, mean_of
from cosmos_core.policy.objective import Known
from cosmos_core.protocols import Decided, Loss


class Measures:
    """Accumulates over micro-batches, without waiting for the device."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[torch.Tensor, int]] = {}
        self._log_ratio: list[torch.Tensor] = []

    def take(self, total: torch.Tensor, decided: Decided, loss: Loss, known: Known, *, version: int) -> None:
        """Take in a micro-batch.

        Args:
            total: Its part of the batch's loss.
            decided: What its forward gave.
            loss: What the algorithm made of it, with its own metrics.
            known: What was known before.
            version: Weight version that the forward used.
        """
        number = len(known.weights_N)
        self._add("loss", total, 0)
        for name, values_N in loss.metrics.items():
            self._add(name, values_N.detach().sum(), number)
        if decided.entropy_N is not None:
            self._add("entropy", decided.entropy_N.sum(), number)
        if known.has_behaviour:
            self._compare(decided.logprobs_N.detach(), known, version)

    def meter(self) -> Meter:
        """The step's quantities on this replica."""
        meter = mean_of(self._totals)
        if self._log_ratio:
            log_ratio_N = torch.cat(self._log_ratio)
            if len(log_ratio_N):
                meter.add("mismatch_kl", -float(log_ratio_N.sum()), len(log_ratio_N))
                meter.peak("mismatch_max_ratio", float(log_ratio_N.abs().max().exp()))
        return meter

    def _compare(self, logprobs_N: torch.Tensor, known: Known, version: int) -> None:
        """Trainer against engine, on decisions that the engine made with these very weights.

        The k1 estimator: mean of log μ - log π over samples of μ. Source: http://joschu.net/blog/kl-approx.html.
        """
        same_N = known.versions_N == version
        self._log_ratio.append((logprobs_N - known.behaviour_logprobs_N)[same_N])
        self._add("behaviour_kl", (known.behaviour_logprobs_N - logprobs_N).sum(), len(logprobs_N))

    def _add(self, name: str, total: torch.Tensor, count: int) -> None:
        held, number = self._totals.get(name, (None, 0))
        self._totals[name] = (total if held is None else held + total, number + count)
