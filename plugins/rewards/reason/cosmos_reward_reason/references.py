"""The right answers by a prompt's reference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import attrs

from cosmos_core.errors import DataError
from cosmos_core.types import JSON

_LETTER: Final = re.compile(r"\(?(\w+)\)?[.:)]?(?:\s+(.*))?", re.DOTALL)


@attrs.frozen(kw_only=True)
class Right:
    """The right answers.

    Attributes:
        accepted: Free answers, normalised.
        choice: Letter of the right choice; empty for free answers.
        choices: Text of each choice, normalised, by letter.
    """

    accepted: frozenset[str] = frozenset()
    choice: str = ""
    choices: Mapping[str, str] = attrs.field(factory=dict)

    def is_met_by(self, answer: str) -> bool:
        """True if an answer is right: the letter, with or without its text, or the text alone; or a whole free answer.

        An answer whose letter and text are of two choices is wrong. A lone letter of a choice is that choice, whatever
        the texts are.
        """
        if not self.choice:
            return normalised(answer) in self.accepted
        found = _LETTER.fullmatch(answer.strip())
        letter = found[1].casefold() if found else ""
        rest = normalised(found[2] or "") if found else ""
        if letter == self.choice.casefold() and rest in ("", self.choices[self.choice]):
            return True
        is_letter_alone = not rest and letter in {each.casefold() for each in self.choices}
        return not is_letter_alone and normalised(answer) == self.choices[self.choice]


def right_answer(reference: JSON) -> Right:
    """Read a reference: `{"choice": "B", "choices": {"A": "…", "B": "…"}}`, an answer, or a list of those accepted.

    Raises:
        DataError: It is something else.
    """
    if isinstance(reference, Mapping):
        choice, choices = reference.get("choice"), reference.get("choices")
        if isinstance(choice, str) and isinstance(choices, Mapping) and choice in choices:
            return Right(choice=choice, choices={letter: normalised(str(text)) for letter, text in choices.items()})
    else:
        listed = reference if isinstance(reference, list) else [reference]
        if listed and all(isinstance(each, str) and each.strip() for each in listed):
            return Right(accepted=frozenset(normalised(str(each)) for each in listed))
    raise DataError(
        f"reward reason-accuracy: the reference {reference!r:.100} is no answer, no list of answers, and no choice "
        "among choices; check the dataset's reference field"
    )


def normalised(text: str) -> str:
    """Lower case, single spaces, no period at the end."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()
