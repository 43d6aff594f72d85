"""The mapping of a row to a prompt: the video, what is asked of it, what is right, and what is imitated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cosmos_core.data import BadRowError, locations
from cosmos_core.data.mapping import chat_of
from cosmos_core.types import Prompt
from cosmos_dataset_reason.ontology import levels
from cosmos_dataset_reason.options import ReasonOptions
from cosmos_dataset_reason.prompts import ask, chat_with
from cosmos_dataset_reason.question import question_of

MEDIA: Final = ("video", "image", "media")
"""Fields of which a row has one: the location of a video or image, or a list of them."""
CONVERSATION: Final = "conversations"
"""The field of turns that end with the demonstration, as in the data that Cosmos-Reason1 was published with."""
_ASKED: Final = ("question", "qa_pairs")
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class QuestionMapping:
    """The mapping (see `RowMapping`).

    Args:
        options: How questions are asked.
        media_folder: Where relative paths of media start; the folder of a row's file if None.
        is_imitated: Whether a row without a demonstration is a bad one.
    """

    def __init__(self, options: ReasonOptions, media_folder: Path | None, *, is_imitated: bool = False) -> None:
        self._options: Final = options
        self._media_folder: Final = media_folder
        self._is_imitated: Final = is_imitated

    def prompt(self, row: Any, folder: Path) -> Prompt:
        """Make the prompt of a row.

        Raises:
            BadRowError: The row cannot be used, and why.
        """
        if not isinstance(row, Mapping):
            raise BadRowError(f"a row is an object of named fields, not a {type(row).__name__}")
        prompt = self._prompt(row, folder)
        if self._is_imitated and prompt.demonstration is None:
            raise BadRowError(
                "the question has no demonstration, and the option `demonstrations` is 'required'; give it a field "
                "`reasoning`, or `conversations` that end with the assistant's turn"
            )
        return prompt

    def _prompt(self, row: Mapping[str, Any], folder: Path) -> Prompt:
        if row.get(CONVERSATION) is not None:
            return self._chat(row, folder)
        question = question_of(row)
        return ask(question, self._options, media=self._media(row, folder), labels=self._labels(row))

    def _chat(self, row: Mapping[str, Any], folder: Path) -> Prompt:
        """The prompt of a chat: its last turn is imitated, and the answer in it is what is right."""
        if asked := next((name for name in _ASKED if row.get(name) is not None), None):
            raise BadRowError(f"the row has both {CONVERSATION!r} and {asked!r}; give one of them")
        if not self._options.chat:
            raise BadRowError(f"field {CONVERSATION!r} is a chat, and the option `chat` is false")
        turns, said = chat_of(row, CONVERSATION)
        if said is None or not said.strip():
            raise BadRowError(f"field {CONVERSATION!r} does not end with a turn of the assistant, which is imitated")
        answers = _ANSWER.findall(said)
        right = answers[0] if len(answers) == 1 and answers[0].strip() else said
        return Prompt(
            text=chat_with(self._options, *turns),
            reference=[right.strip()],
            demonstration=said,
            media=self._media(row, folder),
            metadata={"labels": [*self._labels(row)], "answer_kind": "free"},
        )

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
        return all_levels(listed)


def all_levels(labels: list[Any]) -> list[str]:
    """Labels with all that is above them, each once.

    Raises:
        BadRowError: One of them is none.
    """
    found: dict[str, None] = {}
    for label in labels:
        if not isinstance(label, str):
            raise BadRowError(f"label {label!r:.80} is a {type(label).__name__}, not a text")
        try:
            found |= dict.fromkeys(levels(label))
        except ValueError as error:
            raise BadRowError(str(error)) from None
    return list(found)
