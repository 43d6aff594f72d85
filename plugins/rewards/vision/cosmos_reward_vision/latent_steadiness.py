"""Reward `latent-temporal-consistency`: how little the latents turn from frame to frame; nothing is decoded.

Shape suffixes: C channels, T latent frames, H and W latent height and width.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl


@attrs.frozen(kw_only=True)
class LatentSteadinessOptions:
    """Options of `latent-temporal-consistency`."""

    free: float = option(
        0.0,
        help="Distance that costs nothing, from 0 to 2: without it, the best video is one that stands still.",
        validator=check.and_(check.ge(0.0), check.lt(2.0)),
    )


class LatentSteadiness:
    """Minus the mean cosine distance of successive latent frames, as far as it is above `free`; from -2 to 0.

    A cosine, and no difference as of `temporal-consistency`: the scale of latents is another one with each autoencoder.
    """

    def __init__(self, options: LatentSteadinessOptions, context: RewardContext) -> None:
        self._free: Final = options.free
        self._name: Final = context.name

    def score(self, completion: Completion) -> Score:
        """Compare successive latent frames.

        Raises:
            DataError: There are no latents or a single frame of them, or a frame of zeros.
        """
        latents_CTHW = self._latents(completion)
        frames_TN = latents_CTHW.transpose(1, 0, 2, 3).reshape(latents_CTHW.shape[1], -1).astype(np.float64)
        if len(frames_TN) < 2:
            raise DataError(f"reward {self._name}: latents of one frame have no successive ones; use it for videos")
        norms_T = np.linalg.norm(frames_TN, axis=1)
        if not norms_T.all():
            raise DataError(f"reward {self._name}: latent frame {int(norms_T.argmin())} is zero, and has no direction")
        distances = 1.0 - (frames_TN[1:] * frames_TN[:-1]).sum(axis=1) / (norms_T[1:] * norms_T[:-1])
        value = -float(np.maximum(distances - self._free, 0.0).mean())
        return Score(value=value, details={"distance": round(float(distances.mean()), 4)})

    def _latents(self, completion: Completion) -> npt.NDArray[np.float32]:
        """The finished latents: float32 [C, T, H, W]."""
        payload = completion.payload
        found = None if payload is None or payload.kind != "latents" else payload.arrays.get("sample")
        if found is None:
            raise DataError(f"reward {self._name}: the completion has no latents; use an engine of world models")
        if found.dtype != "float32" or len(found.shape) != 4:
            raise DataError(
                f"reward {self._name}: the latents are {found.dtype} {found.shape}; expected float32 "
                "[channels, frames, height, width]"
            )
        return np.frombuffer(found.data, np.float32).reshape(found.shape)


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the consistency."""
    capabilities = RewardCapabilities(payload_kinds=frozenset({"latents"}))
    return Provider(create=LatentSteadiness, options=LatentSteadinessOptions, capabilities=capabilities)
