"""Patches beside tokens: in payloads of the kind `tokens`, and in packed rows.

A payload with media has three arrays more, of everything seen in the order of its placeholders: `patches` uint8 [M, W],
`grids` int32 [n, 3] (patches over time, height and width of each) and `steps_s` float32 [n] (seconds that a temporal
patch of a video lasts; 0 for an image). Without `kinds`, the prompt's placeholders are what is seen (see
`cosmos_core.types.Payload`); with them, a placeholder that the model itself wrote is text.

Shape legend: U units of a packed row, K places of visual tokens in it, M patches, W values of one, n images and videos.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from cosmos_core.errors import DataError
from cosmos_core.models import values
from cosmos_core.models.tokens import KINDS, array_of, view
from cosmos_core.protocols import MicroBatch
from cosmos_core.types import Array, Payload
from cosmos_model_qwen_vl.patches import Seen
from cosmos_model_qwen_vl.rope import IMAGE, TEXT, VIDEO, RopePositions

PATCHES = "patches"
GRIDS = "grids"
STEPS = "steps_s"
PLACES = "visual"
ARRAYS = frozenset({PATCHES, GRIDS, STEPS})
"""Of a payload that shows something: all of them."""


@attrs.frozen(kw_only=True)
class MediaTokens:
    """Placeholder tokens, and how many patches one stands for.

    Attributes:
        image_id: Token of images.
        video_id: Token of videos.
        merged: Patches that become one token.
        patch_width: W.
    """

    image_id: int
    video_id: int
    merged: int
    patch_width: int

    def kinds(self, tokens: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
        """`TEXT`, `IMAGE` or `VIDEO` of each token."""
        return np.select([tokens == self.image_id, tokens == self.video_id], [IMAGE, VIDEO], TEXT).astype(np.int64)


def with_seen(payload: Payload, seen: Sequence[Seen], tokens: MediaTokens) -> Payload:
    """The payload, with the patches of what its placeholders stand for.

    Raises:
        DataError: The text has other placeholders than those: it was written with the tokens of this family in it.
    """
    expected = sum(len(each.patches_MW) for each in seen) // tokens.merged
    found = int((tokens.kinds(values(payload, "prompt")) != TEXT).sum())
    if found != expected:
        raise DataError(
            f"the prompt has {found} placeholders of patches, and its {len(seen)} media need {expected}; "
            "texts may not contain <|image_pad|> or <|video_pad|>: mark places with <image> and <video>"
        )
    if not seen:
        return payload
    arrays = {
        PATCHES: array_of(np.concatenate([each.patches_MW for each in seen])),
        GRIDS: array_of(np.asarray([each.grid for each in seen], dtype=np.int32)),
        STEPS: array_of(np.asarray([each.step_s for each in seen], dtype=np.float32)),
    }
    return attrs.evolve(payload, arrays={**payload.arrays, **arrays})


def lay_out(batch: MicroBatch, payloads: Sequence[Payload], tokens: MediaTokens, rope: RopePositions) -> MicroBatch:
    """The micro-batch, with what its sequences see.

    `inputs` has more: `positions` int64 [3, U], `patches` uint8 [M, W], `grids` int64 [n, 3] and `visual` int64 [K],
    the places of what the tower makes of the patches, in order.

    Raises:
        DataError: A payload has other patches than its grids and placeholders say.
    """
    lengths = batch.inputs["lengths"].tolist()
    members = [payloads[index] for index in batch.sequences]
    positions, places, start = [], [], 0
    for number, length in enumerate(lengths):
        # What fills a row up sees nothing.
        payload = members[number] if number < len(members) else None
        tokens_U = batch.inputs["tokens"][start : start + length]
        kinds_U = torch.zeros_like(tokens_U)
        if payload is not None and not ARRAYS.isdisjoint(payload.arrays):
            check_seen(payload, batch.sequences[number], tokens)
            prompt = kinds_of(payload, tokens)[:length]
            kinds_U[: len(prompt)] = torch.from_numpy(prompt)
        positions.append(_positions(tokens_U, kinds_U, payload, rope))
        places.append(kinds_U.nonzero()[:, 0] + start)
        start += length
    seen = [payload for payload in members if PATCHES in payload.arrays]
    none = np.zeros((0, tokens.patch_width), dtype=np.uint8)
    inputs = {
        "positions": torch.cat(positions, dim=1),
        PATCHES: torch.from_numpy(np.concatenate([none, *(view(payload, PATCHES) for payload in seen)])),
        GRIDS: torch.from_numpy(
            np.concatenate([np.zeros((0, 3), np.int64), *(view(payload, GRIDS) for payload in seen)])
        ),
        PLACES: torch.cat(places),
    }
    return attrs.evolve(batch, inputs={**batch.inputs, **inputs})


def kinds_of(payload: Payload, tokens: MediaTokens) -> npt.NDArray[np.int64]:
    """The kind of each unit of the prompt, and of those after it up to the last that is seen.

    Raises:
        DataError: What the payload says of them fits neither its units nor their placeholders.
    """
    if KINDS not in payload.arrays:
        return tokens.kinds(values(payload, "prompt"))
    kinds_P, units = values(payload, KINDS).astype(np.int64), values(payload, "prompt")
    least = len(units)
    if "completion" in payload.arrays:
        units = np.concatenate([units, values(payload, "completion")])
    others = tokens.kinds(units[: len(kinds_P)])
    if not least <= len(kinds_P) <= len(units) or (others != kinds_P)[kinds_P != TEXT].any():
        raise DataError(
            f"{KINDS} of {len(kinds_P)} units, of a prompt of {least} and {len(units)} units in all, are not those of "
            "its placeholders; encode the dialogue anew"
        )
    return kinds_P


def check_seen(payload: Payload, index: int, tokens: MediaTokens) -> None:
    """Refuse arrays that do not belong together: they may come from anywhere.

    Raises:
        DataError: A payload has other patches than its grids and placeholders say, or a grid, a time or a kind that no
            image and no video has.
    """
    found = {name: _form(payload.arrays.get(name)) for name in sorted(ARRAYS)}
    kinds_P = kinds_of(payload, tokens)
    seen_K = kinds_P[kinds_P != TEXT]
    num_patches = len(seen_K) * tokens.merged
    _, number, *_ = *found[STEPS], 0
    expected = {
        PATCHES: ("uint8", num_patches, tokens.patch_width),
        GRIDS: ("int32", number, 3),
        STEPS: ("float32", number),
    }
    grids = view(payload, GRIDS).tolist() if found == expected else []
    # Python's own integers: what was made up overflows others.
    sizes = [math.prod(grid) for grid in grids]
    if found != expected or sum(sizes) != num_patches:
        raise DataError(
            f"payload {index}: its prompt has {len(seen_K)} placeholders, of {tokens.merged} patches of "
            f"{tokens.patch_width} values each, and the arrays {found} with grids {grids} do not fit them; encode the "
            "prompt anew"
        )
    side, first = math.isqrt(tokens.merged), 0
    for place, (grid, step_s) in enumerate(zip(grids, values(payload, STEPS).tolist(), strict=True)):
        where = f"payload {index}: grid {grid} and {step_s:g} s a step of its media {place}"
        if min(grid) < 1 or grid[1] % side or grid[2] % side or not 0 <= step_s < math.inf:
            raise DataError(
                f"{where} are no image's and no video's: patches are counted from 1 on, over height and width in "
                f"multiples of {side}, and seconds from 0 (an image) on; encode the prompt anew"
            )
        last = first + sizes[place] // tokens.merged
        kind, name = (VIDEO, "a video") if step_s else (IMAGE, "an image")
        if (seen_K[first:last] != kind).any():
            raise DataError(
                f"{where} are {name}'s, and of its placeholders {first} to {last - 1} "
                f"{int((seen_K[first:last] != kind).sum())} are of the other kind; encode the prompt anew"
            )
        first = last


def _form(array: Array | None) -> tuple[str | int, ...]:
    """Name of the dtype, and sizes."""
    return ("missing",) if array is None else (array.dtype, *array.shape)


def _positions(
    tokens_U: torch.Tensor, kinds_U: torch.Tensor, payload: Payload | None, rope: RopePositions
) -> torch.Tensor:
    if payload is None or PATCHES not in payload.arrays:
        return torch.arange(len(tokens_U)).expand(3, -1)
    grids, steps_s = view(payload, GRIDS).tolist(), values(payload, STEPS).tolist()
    return rope.of(tokens_U, kinds_U, grids, steps_s)
