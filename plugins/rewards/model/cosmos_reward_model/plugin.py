"""Entry point of the reward `reward-model`."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.batching import Batcher
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl

if TYPE_CHECKING:
    from cosmos_reward_model.classifier import Classifier


@attrs.frozen(kw_only=True)
class RewardModelOptions:
    """Options of `reward-model`."""

    path: str = option(help="Folder or hub name of a sequence classifier, with its tokenizer.")
    label: int = option(0, help="Which of the classifier's outputs is the score.", validator=check.ge(0))
    sigmoid: bool = option(
        False, help="Whether to score with the output's sigmoid, from 0 to 1, instead of with itself."
    )
    longest: int | None = option(
        None,
        help="Most tokens; what is more is cut off at the end. Absent: the model's own limit.",
        validator=check.optional(check.ge(1)),
    )
    batch: int = option(8, help="Most completions of a forward.", validator=check.ge(1))
    wait_ms: float = option(
        20.0, help="Milliseconds that a completion waits for others of the same forward.", validator=check.ge(0.0)
    )
    device: str = option("cpu", help="Where the model is, such as `cuda:1`; every worker of a replica holds a copy.")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", help="What it computes in.")


class RewardModel:
    """A classifier's output for the prompt and the completion."""

    def __init__(self, options: RewardModelOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name
        self._classifier: Classifier | None = None
        # One forward at a time, on a thread of its own, so that the time limits of others go on.
        self._thread: Final = concurrent.futures.ThreadPoolExecutor(1, "reward-model")
        self._batcher: Final = Batcher(self._forward, size=options.batch, wait_s=options.wait_ms / 1000.0)

    def absent(self) -> str:
        """The folder, where the path can only be one and there is none."""
        path = Path(self._options.path)
        if not path.is_absolute() or path.is_dir():
            return ""
        return f"path: '{path}' is no folder on this machine; put the checkpoint there, or give another path"

    def load(self) -> None:
        """Load the weights.

        Raises:
            ConfigError: They are not there, or of no sequence classifier with such an output.
        """
        # torch is imported by the workers alone that need it.
        from cosmos_reward_model.classifier import Classifier  # noqa: PLC0415 - see above

        options = self._options
        try:
            self._classifier = Classifier(
                options.path, device=options.device, dtype=options.dtype, longest=options.longest
            )
        # A torch that was built without CUDA asserts that it was.
        except (OSError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigError(f"path: {options.path!r} cannot be loaded as a sequence classifier: {error}") from error
        if options.label >= self._classifier.num_labels:
            raise ConfigError(f"label: {options.label}, but {options.path!r} has {self._classifier.num_labels} outputs")

    async def score(self, completion: Completion) -> Score:
        """Classify, together with other completions."""
        return await self._batcher.put(completion)

    async def _forward(self, completions: Sequence[Completion]) -> list[Score]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._classify, completions)

    def _classify(self, completions: Sequence[Completion]) -> list[Score]:
        assert self._classifier is not None, "load() comes first"
        options = self._options
        return [
            Score(
                value=each.score(options.label, sigmoid=options.sigmoid),
                details={"tokens": each.num_tokens} | ({"cut_off": each.num_cut} if each.num_cut else {}),
            )
            for each in self._classifier.classify(completions)
        ]


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the reward model."""
    # What else is in a batch changes the last bits of a score.
    capabilities = RewardCapabilities(deterministic=False)
    return Provider(create=RewardModel, options=RewardModelOptions, capabilities=capabilities)
