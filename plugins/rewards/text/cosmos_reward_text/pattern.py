"""Reward `regex`: a regular expression matches."""

from __future__ import annotations

import re
from typing import Final

import attrs

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_core.types import Prompt
from cosmos_reward_text.answer import inside, tag_option

_REFERENCE: Final = "{reference}"
_SHOWN_CHARACTERS: Final = 200


@attrs.frozen(kw_only=True)
class RegexOptions:
    """Options of `regex`."""

    pattern: str = option(
        help="Regular expression of Python's `re`. `{reference}` in it stands for the row's reference, to the letter."
    )
    tag: str | None = tag_option()
    whole: bool = option(False, help="Whether all of the text must match, not a part of it.")
    ignore_case: bool = option(False, help="Whether `A` matches `a`.")
    dot_matches_newline: bool = option(False, help="Whether `.` matches the end of a line, too.")


class Regex:
    """1 where the pattern matches, else 0."""

    def __init__(self, options: RegexOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name
        self._refers: Final = _REFERENCE in options.pattern
        try:
            self._fixed: Final = self._compiled("")
        except re.error as error:
            raise ConfigError(f"pattern: {options.pattern!r} is no regular expression: {error}") from None

    def vet(self, prompt: Prompt) -> None:
        """Look at the reference, where the pattern has it.

        Raises:
            DataError: It is no text and no number.
        """
        self._pattern(prompt)

    def score(self, completion: Completion) -> Score:
        """Match the text.

        Raises:
            DataError: The pattern has the reference, and it is no text and no number.
        """
        pattern = self._pattern(completion.prompt)
        text = inside(completion.own, self._options.tag)
        if text is None:
            return Score(value=0.0, details={"matched": None})
        found = pattern.fullmatch(text) if self._options.whole else pattern.search(text)
        return Score(
            value=float(found is not None), details={"matched": found[0][:_SHOWN_CHARACTERS] if found else None}
        )

    def _pattern(self, prompt: Prompt) -> re.Pattern[str]:
        if not self._refers:
            return self._fixed
        reference = prompt.reference
        if not isinstance(reference, str | int | float) or isinstance(reference, bool) or not str(reference).strip():
            raise DataError(
                f"reward {self._name}: the reference {reference!r:.200} is no text and no number, and the pattern has "
                "it; check the dataset's reference field"
            )
        return self._compiled(re.escape(str(reference).strip()))

    def _compiled(self, reference: str) -> re.Pattern[str]:
        flags = re.IGNORECASE * self._options.ignore_case | re.DOTALL * self._options.dot_matches_newline
        return re.compile(self._options.pattern.replace(_REFERENCE, f"(?:{reference})"), flags)


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the regular expression."""
    return Provider(create=Regex, options=RegexOptions, capabilities=RewardCapabilities())
