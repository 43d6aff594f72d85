"""Reward `clip-similarity`: how well the frames fit the prompt, by a model of the CLIP family."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Completion, Provider, Reward, RewardContext, Score, hookimpl
from cosmos_reward_vision.frames import CAPABILITIES, frames_of, some_of, text_of

if TYPE_CHECKING:
    from cosmos_reward_vision.clip import Clip


@attrs.frozen(kw_only=True)
class ClipOptions:
    """Options of `clip-similarity`."""

    path: str = option(help="Folder or hub name of a CLIP model, with its tokenizer.")
    frames: int = option(8, help="Most frames that are looked at, spread evenly.", validator=check.ge(1))
    device: str = option("cpu", help="Where the model is, such as `cuda:1`; every worker holds a copy.")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", help="What it computes in.")


class ClipSimilarity:
    """The cosine of the angle between the embeddings of prompt and frame, averaged over frames; from -1 to 1.

    Source: CLIPScore, arXiv 2104.08718, equation 1. Deviations: neither cut at 0 nor times 2.5; averaged over frames.
    """

    def __init__(self, options: ClipOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name
        self._clip: Clip | None = None

    def absent(self) -> str:
        """The folder, where the path can only be one and there is none."""
        path = Path(self._options.path)
        if not path.is_absolute() or path.is_dir():
            return ""
        return f"path: '{path}' is no folder on this machine; put the checkpoint there, or give another path"

    def load(self) -> None:
        """Load the model.

        Raises:
            ConfigError: It is not there, or none of the family.
        """
        from cosmos_reward_vision.clip import Clip  # noqa: PLC0415 - planning makes rewards, and has no need of torch

        options = self._options
        try:
            self._clip = Clip(options.path, device=options.device, dtype=options.dtype)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"path: {options.path!r} cannot be loaded as a CLIP model: {reason}") from error

    def score(self, completion: Completion) -> Score:
        """Compare the frames with the prompt.

        Raises:
            DataError: Nothing was rendered.
        """
        assert self._clip is not None
        frames_FHWC = some_of(frames_of(completion, self._name), self._options.frames)
        similarities, num_cut = self._clip.similarities(text_of(completion.prompt), frames_FHWC)
        details = {"frames": len(similarities)} | ({"tokens_cut": num_cut} if num_cut else {})
        return Score(value=sum(similarities) / len(similarities), details=details)


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the similarity."""
    return Provider(create=ClipSimilarity, options=ClipOptions, capabilities=CAPABILITIES)
