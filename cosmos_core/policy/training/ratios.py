"""Ratios of the policy's probability of each decision to that which the engine recorded, kept for people to look at.

Weights are those that the step began from. Shape legend: N decisions of a micro-batch, n of one sequence.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from cosmos_core.policy.training.microbatch import Prepared, pieces

_MOST: Final = 1 << 20
"""Decisions of a step whose ratios are kept."""


class Ratios:
    """Takes the log-probs of this process's micro-batches, without waiting for the device before `read`."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, bool]] = []
        self._logs: list[torch.Tensor] = []
        self._number = 0

    def take(self, prepared: Prepared, index: int, logprobs_N: torch.Tensor) -> None:
        """Take in a micro-batch, if an engine recorded log-probs and there is room."""
        known = prepared.known[index]
        self._number += len(logprobs_N)
        if not known.has_behaviour or self._number > _MOST:
            return
        self._logs.append(logprobs_N.detach() - known.behaviour_logprobs_N)
        for piece in pieces(prepared.batches[index]):
            place = prepared.sequences[piece.sequence].place
            self._pieces.append((place, piece.number, piece.number == piece.span.total))

    def read(self) -> dict[int, npt.NDArray[Any]]:
        """The ratios float32 [n] of sequences that are here whole, by their places in the batch."""
        if not self._logs:
            return {}
        ratios = torch.cat(self._logs).float().exp().cpu().numpy()
        parts = np.split(ratios, np.cumsum([number for _, number, _ in self._pieces])[:-1])
        return {place: part for (place, _, is_whole), part in zip(self._pieces, parts, strict=True) if is_whole}
