"""The experts that the rollout used, from payloads into the row of a micro-batch.

Source: arXiv:2510.11370 (routing replay from the rollout): the mask is the rollout's, the weights are training's.

An engine that records them adds the array `experts` to a completion: int16 [P + N - 1, L, K], for every unit that went
through the model, the prompt's first; layers without experts hold -1. A completion of no units has none.

Shape legend: U units of a row, L layers, K experts of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from cosmos_core.errors import DataError
from cosmos_core.protocols import MicroBatch
from cosmos_core.types import Payload
from cosmos_model_moe.routing import NO_CHOICE

ARRAY: Final = "experts"


def row_of(batch: MicroBatch, payloads: Sequence[Payload], *, num_layers: int, top_k: int) -> torch.Tensor:
    """Recorded choices int16 [U, L, K] of a packed row, `NO_CHOICE` where there are none.

    Args:
        batch: A micro-batch.
        payloads: What it was packed from.
        num_layers: L.
        top_k: K.

    Raises:
        DataError: A payload that an engine generated has no choices, or others than the model's.
    """
    lengths = batch.inputs["lengths"].tolist()
    row = np.full((batch.num_units, num_layers, top_k), NO_CHOICE, dtype=np.int16)
    start = 0
    for index, length in zip(batch.sequences, lengths, strict=False):
        recorded = _recorded(payloads[index], index, (length, num_layers, top_k))
        if recorded is not None:
            row[start : start + length] = recorded
        start += length
    return torch.from_numpy(row)


def _recorded(payload: Payload, index: int, shape: tuple[int, int, int]) -> np.ndarray | None:
    array = payload.arrays.get(ARRAY)
    if array is None:
        if "logprobs" in payload.arrays and payload.arrays["completion"].nbytes:
            raise DataError(
                f"payload {index} has no array {ARRAY!r}: the rollout engine did not record its experts; "
                "choose one that does, or set model.options.router_replay = false"
            )
        return None
    if array.dtype != "int16" or tuple(array.shape) != shape:
        raise DataError(
            f"payload {index}: {ARRAY!r} is {array.dtype} {list(array.shape)}; int16 {list(shape)} is needed "
            "(units, layers, experts of a unit)"
        )
    return np.frombuffer(array.data, dtype=np.int16).reshape(shape)
