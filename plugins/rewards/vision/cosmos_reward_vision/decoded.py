"""Reward `decoded`: another reward of frames, for latents, which an autoencoder makes frames of."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import (
    Completion,
    ModelContext,
    Provider,
    Reward,
    RewardCapabilities,
    RewardContext,
    Score,
    hookimpl,
)
from cosmos_core.types import JSON, Payload, Prompt

if TYPE_CHECKING:
    from cosmos_core.protocols.world import WorldModel

_PROBE: Final = 8
"""Height and width of the latents that are decoded when a worker starts."""


@attrs.frozen(kw_only=True)
class DecodedOptions:
    """Options of `decoded`."""

    reward: str = option(help="Name of the reward plugin that scores the frames.")
    reward_options: Mapping[str, JSON] = option(factory=dict, help="Its own options.")
    model: str = option(help="Name of the model plugin whose autoencoder decodes, such as `wan`.")
    path: str = option(help="Folder or hub name of a checkpoint with the autoencoder; of the rest, configs are read.")
    model_options: Mapping[str, JSON] = option(factory=dict, help="The model plugin's own options.")
    device: str = option("cpu", help="Where it decodes, such as `cuda:1`; every worker holds a copy.")


class Decoded:
    """The score of frames, decoded from latents where a completion brings no frames."""

    def __init__(self, options: DecodedOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name
        plugins = PluginSet.load([("reward", options.reward), ("model", options.model)])
        scores = plugins.provider("reward", options.reward).capabilities.payload_kinds
        makes = plugins.provider("model", options.model).capabilities.payload_kinds
        if "media" not in scores:
            raise ConfigError(f"reward: {options.reward!r} scores {', '.join(sorted(scores))}, and no frames")
        if "latents" not in makes:
            raise ConfigError(f"model: {options.model!r} is of {', '.join(sorted(makes))}, and has no autoencoder")
        self._reward: Final[Any] = plugins.create(
            "reward", options.reward, options.reward_options, context, "reward_options"
        )
        source = ModelContext(path=options.path, config=None, assets=Path(options.path))
        made = plugins.create("model", options.model, options.model_options, source, "model_options")
        self._model: Final = cast("WorldModel", made)
        self._channels = 0

    def vet(self, prompt: Prompt) -> None:
        """Ask the reward."""
        if hasattr(self._reward, "vet"):
            self._reward.vet(prompt)

    def absent(self) -> str:
        """The checkpoint's folder, where the path can only be one and there is none; else what the reward lacks."""
        path = Path(self._options.path)
        if path.is_absolute() and not path.is_dir():
            return f"path: '{path}' is no folder on this machine; put the checkpoint there, or give another path"
        return str(self._reward.absent()) if hasattr(self._reward, "absent") else ""

    def unset_variables(self, given: Collection[str]) -> Sequence[str]:
        """Those that the reward needs."""
        names: Sequence[str] = ()
        if hasattr(self._reward, "unset_variables"):
            names = self._reward.unset_variables(given)
        return names

    def load(self) -> None:
        """Load the autoencoder, by decoding something, and the reward.

        Raises:
            ConfigError: The checkpoint is not there, or of another family.
            CheckpointError: It has no usable autoencoder.
        """
        import torch  # noqa: PLC0415 - planning makes rewards

        if hasattr(self._reward, "load"):
            self._reward.load()
        blank = Payload(kind="latents", arrays={})
        self._channels = self._model.latent_spec(blank).shape[0]
        self._model.render(torch.zeros(self._channels, 1, _PROBE, _PROBE, device=self._options.device), blank)

    def score(self, completion: Completion) -> float | Score | Awaitable[float | Score]:
        """Decode, and ask the reward.

        Raises:
            DataError: There are neither frames nor latents, or latents of another autoencoder.
        """
        if completion.media is None:
            completion = attrs.evolve(completion, media=self._decoded(completion.payload))
        score: float | Score | Awaitable[float | Score] = self._reward.score(completion)
        return score

    def _decoded(self, payload: Payload | None) -> Payload:
        import torch  # noqa: PLC0415 - as above

        found = None if payload is None or payload.kind != "latents" else payload.arrays.get("sample")
        if payload is None or found is None:
            raise DataError(f"reward {self._name}: the completion has neither frames nor latents")
        if found.dtype != "float32" or len(found.shape) != 4 or found.shape[0] != self._channels:
            raise DataError(
                f"reward {self._name}: the latents are {found.dtype} {found.shape}; the autoencoder of "
                f"{self._options.path} takes float32 [{self._channels}, frames, height, width]"
            )
        latents = torch.frombuffer(bytearray(found.data), dtype=torch.float32).reshape(found.shape)
        media = self._model.render(latents.to(self._options.device), payload)
        # Of a model's own options are those where nothing says how fast the video is.
        rate = {"fps": payload.arrays["fps"]} if "fps" in payload.arrays else {}
        return attrs.evolve(media, arrays={**media.arrays, **rate})


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the decoding of latents for another reward."""
    capabilities = RewardCapabilities(payload_kinds=frozenset({"latents", "media"}))
    return Provider(create=Decoded, options=DecodedOptions, capabilities=capabilities)
