"""Ordinary dialogues: what a model writes on its worst days too, and every environment must have an answer to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.types import JSON, Message, Prompt

_QUESTION: Final = "What is 34 times 56?"
_TIMES: Final = 3


@attrs.frozen(kw_only=True)
class Script:
    """A row, and the model's turns, as far as the environment asks for them."""

    prompt: Prompt
    turns: tuple[str, ...]


def ordinary_scripts(turns: Sequence[str]) -> tuple[Script, ...]:
    """Dialogues of which each has one turn over and over, of rows of plain text and of a chat.

    Args:
        turns: Turns that mean something to the environment; garbled ones are added.
    """
    metadata: dict[str, JSON] = {"source": "conformance kit", "tags": ["arithmetic", "kit"], "steps": {"number": 2}}
    plain = Prompt(text=_QUESTION, reference="1904", metadata=metadata)
    chat = attrs.evolve(
        plain, text=(Message(role="system", content="Be brief."), Message(role="user", content=_QUESTION))
    )
    garbled = (
        "#### 1904",
        "",
        " \n\t\n",
        "Ответ — 1904 ✅, 世界 🧮, e\u0301, \u200b٨",
        '{"answer": [8, "\\boxed{8 \\frac{ $ ]}',
        "\x00\x1b[31m8\x7f",
        "9" * 5000,
        "34*56=1904 and " * 1000,
    )
    return (
        *(Script(prompt=plain, turns=(turn,) * _TIMES) for turn in (*turns, *garbled)),
        Script(prompt=chat, turns=("#### 1904",) * _TIMES),
    )


def shown(script: Script) -> str:
    """A dialogue in a message."""
    turn = script.turns[0] if script.turns else ""
    text = turn if len(turn) <= 60 else f"{turn[:50]}… ({len(turn)} long)"
    return f"the dialogue of {text!r}"
