"""The mapping of a row to a prompt: the video, the question, its choices, and how to answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cosmos_core.data import BadRowError, locations
from cosmos_core.types import Message, Prompt
from cosmos_dataset_reason.ontology import levels
from cosmos_dataset_reason.options import ReasonOptions
from cosmos_dataset_reason.question import Question, question_of

MEDIA: Final = ("video", "image", "media")
"""Fields of which a row has one: the location of a video or image, or a list of them."""
BY_LETTER: Final = "Answer with the letter of the right choice."
IN_TAGS: Final = "Answer in the following format: <think> your reasoning </think> <answer> your answer </answer>."


class QuestionMapping:
    """The mapping (see `RowMapping`).

    Args:
        options: How questions are asked.
        media_folder: Where relative paths of media start; the folder of a row's file if None.
    """

    def __init__(self, options: ReasonOptions, media_folder: Path | None) -> None:
        self._options: Final = options
        self._media_folder: Final = media_folder

    def prompt(self, row: Any, folder: Path) -> Prompt:
        """Make the prompt of a row.

        Raises:
            BadRowError: The row cannot be used, and why.
        """
        if not isinstance(row, Mapping):
            raise BadRowError(f"a row is an object of named fields, not a {type(row).__name__}")
        question = question_of(row)
        return Prompt(
            text=self._text(question),
            reference=question.reference,
            media=self._media(row, folder),
            metadata={"labels": [*self._labels(row)], "answer_kind": "choice" if question.choices else "free"},
        )

    def _text(self, question: Question) -> str | tuple[Message, ...]:
        lines = [question.text, *(f"({letter}) {text}" for letter, text in question.choices.items())]
        if question.choices:
            lines.append(BY_LETTER)
        if self._options.thought:
            lines.append(IN_TAGS)
        text = "\n".join(lines)
        if not self._options.chat:
            return f"{text}\n"
        system = self._options.system
        turns = () if system is None else (Message(role="system", content=system),)
        return (*turns, Message(role="user", content=text))

    def _media(self, row: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
        named = [name for name in MEDIA if row.get(name) is not None]
        if len(named) != 1:
            told = " and ".join(named) or "none"
            raise BadRowError(f"a question has one of the fields {', '.join(MEDIA)}, and this one has {told}")
        found = locations(row, named[0], self._media_folder or folder)
        if not found:
            raise BadRowError(f"field {named[0]!r} is empty; name what the question is about")
        return found

    def _labels(self, row: Mapping[str, Any]) -> list[str]:
        """The labels of a question with all that is above them, each once."""
        value = row.get("labels", row.get("label"))
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if not listed and self._options.labels == "required":
            raise BadRowError("the question has no label, and the option `labels` is 'required'")
        found: dict[str, None] = {}
        for label in listed:
            if not isinstance(label, str):
                raise BadRowError(f"label {label!r:.80} is a {type(label).__name__}, not a text")
            try:
                found |= dict.fromkeys(levels(label))
            except ValueError as error:
                raise BadRowError(str(error)) from None
        return list(found)
