"""Mode `final-number`: the number after the last `####` must equal the reference, exactly."""

from __future__ import annotations

from decimal import Decimal

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, Score
from cosmos_core.types import JSON, Prompt
from cosmos_reward_math.answer import after_marker, answer_part
from cosmos_reward_math.number import read_number


class FinalNumber:
    """1 for the right number, 0 for another one, for none and for anything beside it on its line."""

    def vet(self, prompt: Prompt) -> None:
        """Read the reference.

        Raises:
            DataError: It is no number.
        """
        _reference_number(prompt.reference)

    def score(self, completion: Completion) -> Score:
        """Compare the final number with the reference.

        Raises:
            DataError: The reference is no number.
        """
        expected = _reference_number(completion.prompt.reference)
        answer = after_marker(completion.own)
        if answer is None:
            return Score(value=0.0, details={"answer": None})
        return Score(value=float(read_number(answer) == expected), details={"answer": answer})


def _reference_number(reference: JSON) -> Decimal:
    number: Decimal | None = None
    if isinstance(reference, str):
        number = read_number(answer_part(reference))
    elif isinstance(reference, int | float) and not isinstance(reference, bool):
        number = read_number(repr(reference))
    if number is None:
        raise DataError(
            f"reward math, mode final-number: the reference {reference!r} is no number; "
            "give the dataset a reference pattern that finds it, or use mode = 'math-verify'"
        )
    return number
