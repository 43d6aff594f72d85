"""Mode `math-verify`: the answer must be mathematically equal to the reference.

math-verify's own time limit is switched off: it is an alarm signal, which works on a main thread only. The core
gives every score a time limit in a process of its own (`timeout_s` of the reward).
"""

from __future__ import annotations

import logging
from typing import Any, Final

from math_verify import parse, verify

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, Score
from cosmos_core.types import JSON, Prompt
from cosmos_reward_math.answer import answer_part

SHOWN_CHARACTERS: Final = 200


class MathVerify:
    """1 for an equal answer, 0 for another one or for one that cannot be read as mathematics."""

    def __init__(self) -> None:
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).addFilter(_is_no_timeout_notice)

    def vet(self, prompt: Prompt) -> None:
        """Read the reference.

        Raises:
            DataError: It cannot be read as mathematics.
        """
        _parse_reference(prompt.reference)

    def score(self, completion: Completion) -> Score:
        """Compare the answer with the reference.

        Raises:
            DataError: The reference cannot be read as mathematics.
        """
        expected = _parse_reference(completion.prompt.reference)
        answer = answer_part(completion.own)
        equal = verify(expected, _parse(answer), timeout_seconds=None, raise_on_error=True)
        return Score(value=float(equal), details={"answer": answer[-SHOWN_CHARACTERS:]})


def _parse_reference(reference: JSON) -> list[Any]:
    is_readable = isinstance(reference, str | int | float) and not isinstance(reference, bool)
    parsed = _parse(answer_part(str(reference))) if is_readable else []
    if not parsed:
        raise DataError(
            f"reward math, mode math-verify: the reference {reference!r} cannot be read as mathematics; "
            "check the dataset's reference field"
        )
    return parsed


def _parse(text: str) -> list[Any]:
    return list(parse(_as_latex(text), parsing_timeout=None))


def _as_latex(text: str) -> str:
    """Mark a bare answer as mathematics; sentences and marked mathematics stay as they are."""
    text = text.removesuffix(".")
    is_bare = text and "\n" not in text and not any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    return f"\\boxed{{{text}}}" if is_bare and len(text.split()) == 1 else text


def _is_no_timeout_notice(record: logging.LogRecord) -> bool:
    """math-verify warns that its time limit is off; it is off on purpose."""
    return not record.getMessage().startswith("Timeout is disabled")
