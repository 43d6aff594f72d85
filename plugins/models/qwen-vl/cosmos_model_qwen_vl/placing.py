"""Where a prompt's images and videos stand in its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.errors import DataError
from cosmos_core.types import Message, Prompt
from cosmos_model_qwen_vl.patches import Seen

MARK: Final = re.compile("<image>|<video>")


def place(prompt: Prompt, seen: Sequence[Seen]) -> Prompt:
    """The prompt with its media's placeholders in the text.

    `<image>` and `<video>` mark places, in the order of `Prompt.media`. Without any mark, all media stand before the
    text, of a chat the first turn of the user. A prompt without media has no marks: there they are text as any other.

    Raises:
        DataError: There are more marks than media, or fewer, or of the other kind.
    """
    if not seen:
        return prompt
    turns = [prompt.text] if isinstance(prompt.text, str) else [turn.content for turn in prompt.text]
    marks = [mark for turn in turns for mark in MARK.findall(turn)]
    if marks:
        texts = _fill(turns, marks, seen)
    else:
        roles = ["user"] if isinstance(prompt.text, str) else [turn.role for turn in prompt.text]
        first = roles.index("user") if "user" in roles else 0
        texts = [*turns]
        texts[first] = "".join(each.text for each in seen) + turns[first]
    if isinstance(prompt.text, str):
        return attrs.evolve(prompt, text=texts[0])
    named = zip(prompt.text, texts, strict=True)
    return attrs.evolve(prompt, text=tuple(Message(role=turn.role, content=text) for turn, text in named))


def _fill(turns: Sequence[str], marks: Sequence[str], seen: Sequence[Seen]) -> list[str]:
    expected = ["<video>" if each.step_s else "<image>" for each in seen]
    if list(marks) != expected:
        raise DataError(
            f"the text has the marks {' '.join(marks)}, and the row's media are {' '.join(expected)}; "
            "give one mark for each, in order, or none at all"
        )
    texts = iter(each.text for each in seen)
    return [MARK.sub(lambda _: next(texts), turn) for turn in turns]
