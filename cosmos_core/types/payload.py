"""The one envelope for what a rollout produces: tokens, latents or media.

A payload is a kind and named arrays. Its bytes travel as they lie (zero-copy frames), so an array
is a dtype, a shape and a buffer; each side views it with its own array library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

if TYPE_CHECKING:
    Bytes: TypeAlias = bytes | memoryview
else:
    # Decoders read annotations at run time, and make bytes.
    Bytes = bytes

ITEM_SIZES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


@attrs.frozen(kw_only=True, eq=False)
class Array:
    """A dense, C-contiguous, little-endian array.

    Attributes:
        dtype: A key of `ITEM_SIZES`.
        shape: Sizes of its dims.
        data: Its bytes; `len(data) == prod(shape) * itemsize` always holds.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def __attrs_post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"array dtype {self.dtype!r} is not one of {', '.join(ITEM_SIZES)}")
        if isinstance(self.data, memoryview) and not self.data.c_contiguous:
            raise ValueError(f"array of {self.dtype} {self.shape} has a view that skips bytes; give a contiguous copy")
        size = self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)
        if size != self.nbytes:
            raise ValueError(f"array of {self.dtype} {self.shape} needs {self.nbytes} bytes, got {size}")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def of_document(index: int, name: str) -> str:
    """The name of an array of one of several documents of a payload (see `Payload`)."""
    return f"{index}:{name}"


@attrs.frozen(kw_only=True, eq=False)
class Payload:
    """Named arrays of one kind.

    Kinds used by the core, and their arrays (P = conditioning units, C = units after them, N = generated units):

    - ``tokens``: ``prompt`` int32 [P], ``completion`` int32 [C], ``logprobs`` float32 [N] (the engine's,
      under the engine's declared semantics), ``versions`` int32 [N] (weight version that made each token).
      ``decided`` bool [C] says which of the completion the model generated, where others stand between: observations
      of an environment, which condition what follows and are never trained on. Without it all are, and C = N.
      ``documents`` int32 [K] says that the completion is of several sequences, an agent's branches, and how many of its
      units each has: the first follows ``prompt``, each other one begins anew. Without it there is one.
      ``turns`` int32 [K] says how many of the decisions each turn of a dialogue has, and ``turn_rewards`` float64 [K]
      what the environment gave for it, times its weight. Without them there is one turn.
      A demonstration has ``prompt`` and ``completion`` only. A model that sees images or videos adds arrays of its own
      for what placeholders stand for. Of a dialogue that shows some, ``kinds`` int64 says of each of its first units,
      the prompt's at least, which those are (1 an image, 2 a video, 0 text, whatever it spells), and the arrays of one
      of several documents have its number before their name: ``1:kinds``.
    - ``latents``: ``times`` float32 [N], one for each decision (1 is noise, 0 is data), and of what was generated
      ``logprobs`` float32 [N] and ``versions`` int32 [N]. The rest is between engine and model (see
      `cosmos_core.protocols.world`; latents are float32 [C, T, H, W]):
      of transitions ``states`` float32 [M, C, T, H, W] that are kept, ``places`` int32 [N, 2], the states before and
      after each, and ``steps`` float32 [N, 3]: the coefficients of x_t and of the velocity in the mean of x', and the
      standard deviation; ``offsets`` float32 [N, C, T, H, W] where the mean has one. Of regressions ``noise_seed``
      int64 []. ``sample`` float32 [C, T, H, W] is x_0: of demonstrations, and of what was generated where regressions
      are learned; ``guidance`` float32 [] that of the velocities, ``fps`` float32 [] that of the video, where it is
      known. A model adds arrays of its own for its conditioning.
    - ``media``: ``frames`` uint8 [F, height, width, 3] (RGB; an image is one frame), ``fps`` float32 [].
    """

    kind: str
    arrays: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.nbytes for array in self.arrays.values())
