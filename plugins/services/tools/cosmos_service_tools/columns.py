"""The parts that columns of rows play in training, by their names and by what the first rows have in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from cosmos_core.protocols.algorithm import Source

_PROMPTS: Final = ("prompt", "question", "problem", "instruction", "query", "input", "text_input")
_CHATS: Final = ("messages", "conversations", "conversation", "chat", "prompt")
_COMPLETIONS: Final = ("completion", "response", "output", "demonstration", "generation")
_REFERENCES: Final = ("reference", "ground_truth", "final_answer", "answer", "expected", "target", "label", "solution")
_MARKED: Final = re.compile(r"####\s*(\S.*)\s*$")
_NUMBER: Final = re.compile(r"[-+]?[$€£]?\s?[\d,]*\.?\d+\s?%?")
_FORMULA: Final = re.compile(r"\\[a-z]+|\$|\^|_\{|^[-+\d\s./*(){}=xyz]+$")
_SHORT: Final = 60


@attrs.frozen(kw_only=True)
class Columns:
    """Names of columns; None where no column plays the part.

    Attributes:
        prompt: A template of the prompt, or None where `messages` is the prompt.
        messages: A chat.
        answers: Whether the chat ends with the assistant's turn.
        completion: A text to imitate.
        reference: What a reward compares with.
        chosen: The better of two completions.
        rejected: The worse one.
    """

    prompt: str | None = None
    messages: str | None = None
    answers: bool = False
    completion: str | None = None
    reference: str | None = None
    chosen: str | None = None
    rejected: str | None = None

    @property
    def has_prompt(self) -> bool:
        """True if there is something to complete."""
        return self.prompt is not None or self.messages is not None

    def feed(self, source: Source) -> bool:
        """True if batches of a source can be made of these columns."""
        if source == "preferences":
            return self.rejected is not None and (self.has_prompt or self.messages == self.chosen)
        if source == "demonstrations":
            return self.answers or (self.has_prompt and (self.completion or self.reference or self.chosen) is not None)
        return self.has_prompt

    @property
    def task(self) -> str | None:
        """The algorithm that they are most likely meant for; None if they are meant for none."""
        if self.feed("preferences"):
            return "dpo"
        if self.answers or (self.has_prompt and self.completion):
            return "sft"
        return "grpo" if self.has_prompt and self.reference else None


def read_columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Find the parts that the columns of some rows play."""
    names: list[str] = list(dict.fromkeys(name for row in rows for name in row))
    values: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    texts = [name for name in names if all(_is_text(value) for value in values[name])]
    chats = [name for name in names if all(_is_chat(value) for value in values[name])]
    completion = next((name for name in _COMPLETIONS if name in texts), None)
    reference = next((name for name in _REFERENCES if name in texts), None)
    messages: str | None = next((name for name in _CHATS if name in chats), None)
    is_compared = {"chosen", "rejected"} <= {*texts}
    if {"chosen", "rejected"} <= {*chats} and all(len(value) > 1 for value in values["chosen"]):
        # The turns before the last are the prompt.
        messages, is_compared = "chosen", True
    chosen, rejected = ("chosen", "rejected") if is_compared else (None, None)
    answers = messages is not None and all(value[-1]["role"] == "assistant" for value in values[messages])
    return Columns(
        prompt=None if messages else _prompt(texts),
        messages=messages,
        answers=answers,
        completion=completion,
        reference=reference,
        chosen=chosen,
        rejected=rejected,
    )


def described(rows: Sequence[Mapping[str, Any]]) -> str:
    """The columns of some rows with what they hold, for people."""
    names = dict.fromkeys(name for row in rows for name in row)
    kinds = {name: dict.fromkeys(_kind(row.get(name)) for row in rows) for name in names}
    return ", ".join(f"{name} ({' or '.join(kinds[name])})" for name in names)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if _is_text(value):
        return "text" if isinstance(value, str) else "number"
    return "a chat" if _is_chat(value) else f"a {type(value).__name__}"


def _prompt(texts: Sequence[str]) -> str | None:
    if {"instruction", "input"} <= {*texts}:
        return "{instruction}\n{input}"
    return next((f"{{{name}}}" for name in _PROMPTS if name in texts), None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(
            isinstance(t, Mapping) and isinstance(t.get("role"), str) and isinstance(t.get("content"), str)
            for t in value
        )
    )


def reference_pattern(answers: Sequence[Any]) -> str | None:
    """The pattern of the part of the answers that counts; None if all of each does."""
    marked = all(_MARKED.search(str(answer)) for answer in answers)
    return "#### (.+)" if marked else None


def reward_for(answers: Sequence[Any]) -> str | None:
    """The reward plugin that fits the look of some answers: `math`, `exact`, or none."""
    found = [_MARKED.search(str(answer)) for answer in answers]
    plain = [str(answer if match is None else match[1]).strip() for answer, match in zip(answers, found, strict=True)]
    if all(_NUMBER.fullmatch(text) or _FORMULA.search(text) for text in plain):
        return "math"
    return "exact" if all(len(text) <= _SHORT and "\n" not in text for text in plain) else None
