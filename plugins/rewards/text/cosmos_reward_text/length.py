"""Reward `length`: close to a target, or a penalty for what is too long."""

from __future__ import annotations

from typing import Final, Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_core.types import Prompt

_POSITIVE: Final = check.optional(check.ge(1))


@attrs.frozen(kw_only=True)
class LengthOptions:
    """Options of `length`; give `target`, `target_field` or `longest`."""

    unit: Literal["tokens", "words", "characters"] = option(
        "tokens", help="What is counted: what the model generated (its stop token included), or its text."
    )
    target: int | None = option(
        None,
        help="Length that scores 1; the score falls in proportion, to 0 at none and at twice as much.",
        validator=_POSITIVE,
    )
    target_field: str | None = option(None, help="Field of the row's metadata that holds the target.")
    longest: int | None = option(None, help="Length from which the score is -1.", validator=_POSITIVE)
    buffer: int = option(
        0, help="Of `longest`, the last part, over which the score falls from 0 to -1.", validator=check.ge(0)
    )


class Length:
    """The length of a completion, scored against the wanted one.

    With a target t, a length n scores max(0, 1 - |n - t| / t).

    With a longest length L and a buffer B it scores 0 up to L - B, (L - B - n) / B up to L, and -1 beyond.
    Source: DAPO, arXiv 2503.14476, equation 13.
    """

    def __init__(self, options: LengthOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name
        given = [name for name in ("target", "target_field", "longest") if getattr(options, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"target, target_field, longest: give one of them; given: {', '.join(given) or 'none'}")
        if options.longest is None and options.buffer:
            raise ConfigError(f"buffer: {options.buffer}, but there is no `longest` that it would be a part of")
        if options.longest is not None and options.buffer > options.longest:
            raise ConfigError(f"buffer: {options.buffer} is more than longest, {options.longest}")

    def vet(self, prompt: Prompt) -> None:
        """Look at the row's target, where it has one.

        Raises:
            DataError: It is missing, or no positive whole number.
        """
        self._target(prompt)

    def score(self, completion: Completion) -> Score:
        """Measure the completion.

        Raises:
            DataError: The row's target is missing, or no positive whole number; or the tokens are not counted.
        """
        target, length = self._target(completion.prompt), self._length(completion)
        if target is not None:
            return Score(
                value=max(0.0, 1.0 - abs(length - target) / target), details={"length": length, "target": target}
            )
        longest, buffer = self._options.longest, self._options.buffer
        assert longest is not None
        over = length - (longest - buffer)
        value = 0.0 if over <= 0 else -1.0 if length > longest else -over / buffer
        return Score(value=value, details={"length": length})

    def _length(self, completion: Completion) -> int:
        unit = self._options.unit
        if unit == "tokens":
            if completion.num_units is None:
                raise DataError(f"reward {self._name}: the number of tokens is not known; set unit = 'words'")
            return completion.num_units
        return len(completion.own.split()) if unit == "words" else len(completion.own)

    def _target(self, prompt: Prompt) -> int | None:
        field = self._options.target_field
        if field is None:
            return self._options.target
        target = prompt.metadata.get(field)
        if isinstance(target, int) and not isinstance(target, bool) and target >= 1:
            return target
        if field in prompt.metadata:
            seen = f"is {target!r:.200}"
        elif prompt.metadata:
            seen = f"the row has only {', '.join(prompt.metadata)}; name it in the dataset's option `metadata`"
        else:
            seen = "the row has no metadata; name it in the dataset's option `metadata`"
        raise DataError(
            f"reward {self._name}: the metadata field {field!r} is to be a whole number from 1 on, but {seen}"
        )


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the length."""
    return Provider(create=Length, options=LengthOptions, capabilities=RewardCapabilities())
