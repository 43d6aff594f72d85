"""Reward `exact`: the answer is the reference, character for character."""

from __future__ import annotations

from typing import Final

import attrs

from cosmos_core.config import option
from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_core.types import JSON, Prompt
from cosmos_reward_text.answer import inside, tag_option

_SHOWN_CHARACTERS: Final = 200


@attrs.frozen(kw_only=True)
class ExactOptions:
    """Options of `exact`."""

    tag: str | None = tag_option()
    after: str | None = option(
        None, help="Look at what follows the last of these words alone, such as `####`; a text without them scores 0."
    )
    ignore_case: bool = option(False, help="Whether `Paris` is `paris`.")
    ignore_spaces: bool = option(False, help="Whether any white space is one space. At both ends it never counts.")


class Exact:
    """1 if the answer is the reference or one of several, else 0. A reference that is the number 8.0 is `8`, too."""

    def __init__(self, options: ExactOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name

    def vet(self, prompt: Prompt) -> None:
        """Look at the reference.

        Raises:
            DataError: It is no text, no number, and no list of them.
        """
        self._accepted(prompt.reference)

    def score(self, completion: Completion) -> Score:
        """Compare the answer with the reference.

        Raises:
            DataError: The reference is no text, no number, and no list of them.
        """
        accepted = self._accepted(completion.prompt.reference)
        answer = inside(completion.own, self._options.tag)
        if answer is not None and self._options.after is not None:
            _, marker, answer = answer.rpartition(self._options.after)
            answer = answer if marker else None
        if answer is None:
            return Score(value=0.0, details={"answer": None})
        answer = self._plain(answer)
        return Score(value=float(answer in accepted), details={"answer": answer[-_SHOWN_CHARACTERS:]})

    def _accepted(self, reference: JSON) -> list[str]:
        listed = reference if isinstance(reference, list) else [reference]
        usable = [each for each in listed if isinstance(each, str | int | float) and not isinstance(each, bool)]
        if not listed or len(usable) < len(listed) or not all(str(each).strip() for each in usable):
            raise DataError(
                f"reward {self._name}: the reference {reference!r:.200} is no text, no number and no list of them; "
                "check the dataset's reference field"
            )
        return [self._plain(text) for each in usable for text in _texts(each)]

    def _plain(self, text: str) -> str:
        text = " ".join(text.split()) if self._options.ignore_spaces else text.strip()
        return text.casefold() if self._options.ignore_case else text


def _texts(reference: str | float) -> list[str]:
    """A number of a table, where 8 is often stored as 8.0, in both forms."""
    is_whole = isinstance(reference, float) and reference.is_integer()
    return [str(reference), str(int(reference))] if is_whole else [str(reference)]


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the exact match."""
    return Provider(create=Exact, options=ExactOptions, capabilities=RewardCapabilities())
