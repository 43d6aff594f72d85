"""One question: what is asked, what there is to choose from, and what is right."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, Final

import attrs

from cosmos_core.data import BadRowError, field, text_field
from cosmos_core.types import JSON

TAGS: Final = ("<think>", "</think>", "<answer>", "</answer>")


@attrs.frozen(kw_only=True)
class Question:
    """A question of a row.

    Attributes:
        text: What is asked.
        choices: Text of each choice by its letter; empty where the answer is free.
        answers: The letter of the right choice, or every free answer that is accepted.
        reasoning: What leads to the first of them, for demonstrations; None where nobody wrote it down.
    """

    text: str
    choices: Mapping[str, str]
    answers: tuple[str, ...]
    reasoning: str | None = None

    @property
    def reference(self) -> JSON:
        """The reference with which rewards compare an answer."""
        if self.choices:
            return {"choice": self.answers[0], "choices": dict(self.choices)}
        return list(self.answers)


def question_of(row: Mapping[str, Any]) -> Question:
    """The question of a row: fields `question`, `choices`, `answer` and `reasoning`, or these within `qa_pairs`.

    `index2ans` is another name of `choices`, as in the data that Cosmos-Reason1 was published with.

    Raises:
        BadRowError: A field is missing or of the wrong type, or the answer is none of the choices.
    """
    asked = row.get("qa_pairs", row)
    if not isinstance(asked, Mapping):
        raise BadRowError(f"field 'qa_pairs' is a {type(asked).__name__}, not one question")
    text = text_field(asked, "question").strip()
    if not text:
        raise BadRowError("the question is empty")
    choices = _choices(asked.get("index2ans", asked.get("choices")))
    answers = _answers(field(asked, "answer"), choices)
    return Question(text=text, choices=choices, answers=answers, reasoning=_reasoning(asked.get("reasoning")))


def _reasoning(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"the reasoning is {value!r:.80}; give a text, or leave it out", "the reasoning is no text")
    if found := next((tag for tag in TAGS if tag in value), None):
        raise BadRowError(f"the reasoning has {found} in it; give what stands between the tags alone")
    return value.strip()


def _choices(value: Any) -> Mapping[str, str]:
    """Choices by letter; a list is lettered from A on."""
    if value is None:
        return {}
    if isinstance(value, list) and len(value) <= len(string.ascii_uppercase):
        value = dict(zip(string.ascii_uppercase, value, strict=False))
    # A reader of tables gives every row the letters of all rows, null where there are fewer.
    found = {key: text for key, text in value.items() if text is not None} if isinstance(value, Mapping) else {}
    if len(found) < 2 or not all(isinstance(text, str) and text.strip() for text in found.values()):
        raise BadRowError(
            f"the choices are {value!r:.100}; give two texts or more, by letter or as a list",
            "the choices are not two texts or more",
        )
    if not all(isinstance(key, str) and key.isalnum() for key in found):
        raise BadRowError(f"the choices have the keys {list(found)!r:.100}; give letters", "choices without letters")
    if len({text.strip() for text in found.values()}) < len(found):
        raise BadRowError(f"two of the choices are the same: {found!r:.100}", "two of the choices are the same")
    return found


def _answers(value: Any, choices: Mapping[str, str]) -> tuple[str, ...]:
    if choices:
        if not isinstance(value, str) or value not in choices:
            raise BadRowError(
                f"the answer is {value!r:.80}, none of the choices {', '.join(choices)}",
                "the answer is none of the choices",
            )
        return (value,)
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(each, str) and each.strip() for each in listed):
        raise BadRowError(f"the answer is {value!r:.80}; give a text, or a list of those that are right", "no answer")
    return tuple(each.strip() for each in listed)
