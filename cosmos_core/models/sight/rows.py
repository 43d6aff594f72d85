"""What is seen, beside tokens: in payloads of the kind `tokens`, and in packed rows.

A payload with images has more arrays: `kinds` int64 [P], 0 for text, and those of a processor, named `media.…`. A row
with images has `told` int64 [U], its tokens without placeholders that stand for nothing (a policy may sample one), and
the processor's arrays of all its documents, joined.

Shape legend: U units of a packed row, P units of a prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from cosmos_core.errors import DataError
from cosmos_core.models.packing import PAD_TOKEN
from cosmos_core.models.sight.joining import join
from cosmos_core.models.sight.positions import OwnPositions
from cosmos_core.models.sight.processor import Processed
from cosmos_core.models.tokens import array_of, tokens_payload, values, view
from cosmos_core.protocols import MicroBatch
from cosmos_core.types import Payload

KINDS: Final = "kinds"
MEDIA: Final = "media."
TOLD: Final = "told"


def with_seen(seen: Processed, completion: Sequence[int] | None) -> Payload:
    """A payload of a prompt with images, and of its completion if there is one."""
    payload = tokens_payload(seen.ids, completion)
    arrays = {f"{MEDIA}{name}": array_of(array) for name, array in seen.arrays.items()}
    return attrs.evolve(payload, arrays={**payload.arrays, KINDS: array_of(seen.kinds), **arrays})


def shows(payload: Payload) -> bool:
    """Whether a payload has images."""
    return any(map(is_media, payload.arrays))


def is_media(name: str) -> bool:
    """Whether an array of a payload is of its images."""
    return name == KINDS or name.startswith(MEDIA)


def lay_out(
    batch: MicroBatch, members: Sequence[Payload], joins: Mapping[str, int], own_positions: OwnPositions | None
) -> MicroBatch:
    """The micro-batch, with what its documents see.

    Args:
        batch: A packed row.
        members: The payloads in it, in order; some with images.
        joins: The dim along which each array of the processor is joined.
        own_positions: Counts positions over several axes; None where there is one.

    Raises:
        DataError: A payload with images lacks an array, or they do not fit together.
    """
    lengths = batch.inputs["lengths"].tolist()
    # What fills a row up sees nothing.
    seen = [_whole(payload, joins) if shows(payload) else None for payload in members]
    seen += [None] * (len(lengths) - len(members))
    kinds = [_kinds(payload, length) for payload, length in zip(seen, lengths, strict=True)]
    inputs = {TOLD: _told(batch.inputs["tokens"], torch.cat(kinds))}
    if own_positions is not None:
        tokens = torch.split(batch.inputs["tokens"], lengths)
        counted = [_positions(*each, own_positions) for each in zip(seen, tokens, kinds, strict=True)]
        inputs["positions"] = torch.cat(counted, dim=1)
    shown = [payload for payload in seen if payload is not None]
    for name, dim in joins.items():
        inputs[f"{MEDIA}{name}"] = torch.from_numpy(join([view(each, f"{MEDIA}{name}") for each in shown], dim))
    return attrs.evolve(batch, inputs={**batch.inputs, **inputs})


def _whole(payload: Payload, joins: Mapping[str, int]) -> Payload:
    wanted = {KINDS, *(f"{MEDIA}{name}" for name in joins)}
    if lost := sorted(wanted - payload.arrays.keys()):
        raise DataError(f"a payload with images lacks {', '.join(lost)}; it has {', '.join(payload.arrays)}")
    sizes = [payload.arrays[name].shape for name in ("prompt", KINDS)]
    if sizes[0] != sizes[1]:
        raise DataError(f"a payload with images has {KINDS} {sizes[1]} of a prompt {sizes[0]}; give one for each unit")
    return payload


def _kinds(payload: Payload | None, length: int) -> torch.Tensor:
    kinds_U = torch.zeros(length, dtype=torch.int64)
    if payload is not None:
        prompt = values(payload, KINDS)[:length]
        kinds_U[: len(prompt)] = torch.from_numpy(prompt.copy())
    return kinds_U


def _told(tokens_U: torch.Tensor, kinds_U: torch.Tensor) -> torch.Tensor:
    placeholders = set(tokens_U[kinds_U != 0].tolist())
    other = next(token for token in itertools.count(PAD_TOKEN) if token not in placeholders)
    is_placeholder_U = torch.isin(tokens_U, torch.tensor(sorted(placeholders)))
    return tokens_U.masked_fill(is_placeholder_U & (kinds_U == 0), other)


def _positions(
    payload: Payload | None, tokens_U: torch.Tensor, kinds_U: torch.Tensor, own: OwnPositions
) -> torch.Tensor:
    if payload is None:
        return torch.arange(len(tokens_U)).expand(own.num_axes, -1)
    media = {
        name.removeprefix(MEDIA): _tensor(view(payload, name)) for name in payload.arrays if name.startswith(MEDIA)
    }
    return own.of(tokens_U, kinds_U, **media)


def _tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array.copy())
