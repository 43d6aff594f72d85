"""Ordinary completions: what a model writes on its worst days too, and every reward must have an answer to."""

from __future__ import annotations

from typing import Final

from cosmos_core.protocols import Completion
from cosmos_core.types import JSON, Message, Prompt

_QUESTION: Final = "Ann has 7 apples, buys 5 more, then loses 4. How many apples now?"
_CHAT: Final = (Message(role="system", content="Be brief."), Message(role="user", content=_QUESTION))


def ordinary_completions() -> tuple[Completion, ...]:
    """Right, wrong, empty, truncated, garbled and endless answers to a question with a reference, and a dialogue."""
    return (
        _completion("7+5=12\n12-4=8\n#### 8"),
        _completion("7+5=12\n#### 12"),
        _completion("The answer is 8."),
        _completion(""),
        _completion(" \n\t\n"),
        _completion("Ответ — 8 ✅, 世界 🧮, e\u0301, \u200b٨"),
        _completion('{"answer": [8, "\\boxed{8 \\frac{ $ ]}'),
        _completion("\x00\x1b[31m8\x7f"),
        _completion("#### " + "9" * 5000, truncated=True),
        _completion("7+5=12 and " * 1000, truncated=True),
        _completion("7+5=1", truncated=True),
        Completion(prompt=Prompt(text=_CHAT, reference="8"), text="#### 8", turns=(_own("#### 8"),), num_units=7),
        _dialogue(_own("calc: 7+5-4="), Message(role="tool", content="8\n"), _own("#### 9")),
    )


def shown(completion: Completion) -> str:
    """A completion in a message."""
    text = completion.text if len(completion.text) <= 60 else f"{completion.text[:50]}… ({len(completion.text)} long)"
    payload = "" if completion.payload is None else f", a payload of {completion.payload.kind}"
    media = "" if completion.media is None else f", frames {list(completion.media.arrays['frames'].shape)}"
    cut = ", truncated" if completion.truncated else ""
    return f"the completion {text!r} (reference {completion.prompt.reference!r:.60}{payload}{media}{cut})"


def _completion(text: str, *, truncated: bool = False) -> Completion:
    metadata: dict[str, JSON] = {"source": "conformance kit", "tags": ["arithmetic", "kit"], "steps": {"number": 2}}
    prompt = Prompt(text=_QUESTION, reference="8", metadata=metadata)
    return Completion(prompt=prompt, text=text, truncated=truncated, turns=(_own(text),), num_units=len(text) + 1)


def _dialogue(*turns: Message) -> Completion:
    """What a tool says is part of the text."""
    return Completion(
        prompt=Prompt(text=_QUESTION, reference="8"),
        text="".join(turn.content for turn in turns),
        turns=turns,
        num_units=sum(len(turn.content) for turn in turns if turn.role == "assistant"),
    )


def _own(text: str) -> Message:
    return Message(role="assistant", content=text)
