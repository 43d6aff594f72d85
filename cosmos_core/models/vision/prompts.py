"""Images and videos in a prompt's text: marks, placeholders, and turns as lists of parts.

`<image>` and `<video>` mark places, in the order of `Prompt.media`. Without any mark, all media stand before the text,
of a chat the first turn of the user. A prompt without media has no marks: there they are text as any other. Templates
of processors take turns as lists of parts; others do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.errors import DataError
from cosmos_core.types import Message, Prompt

IMAGE_MARK: Final = "<image>"
VIDEO_MARK: Final = "<video>"
MARK: Final = re.compile(f"{IMAGE_MARK}|{VIDEO_MARK}")


def with_marks(prompt: Prompt, kinds: Sequence[str]) -> Prompt:
    """The prompt, which has all marks or none, with `IMAGE_MARK` or `VIDEO_MARK` for each of its media.

    Raises:
        DataError: There are more marks than media, or fewer, or of the other kind.
    """
    if not kinds:
        return prompt
    turns = _turns(prompt)
    marks = [mark for turn in turns for mark in MARK.findall(turn)]
    if not marks:
        roles = ["user"] if isinstance(prompt.text, str) else [turn.role for turn in prompt.text]
        first = roles.index("user") if "user" in roles else 0
        return _with_turns(prompt, [*turns[:first], "".join(kinds) + turns[first], *turns[first + 1 :]])
    if list(marks) != list(kinds):
        raise DataError(
            f"the text has the marks {' '.join(marks)}, and the row's media are {' '.join(kinds)}; "
            "give one mark for each, in order, or none at all"
        )
    return prompt


def filled(prompt: Prompt, texts: Sequence[str]) -> Prompt:
    """The prompt with a text in the place of each mark, in order."""
    following = iter(texts)
    return _with_turns(prompt, [MARK.sub(lambda _: next(following), turn) for turn in _turns(prompt)])


def _turns(prompt: Prompt) -> list[str]:
    return [prompt.text] if isinstance(prompt.text, str) else [turn.content for turn in prompt.text]


def _with_turns(prompt: Prompt, turns: Sequence[str]) -> Prompt:
    if isinstance(prompt.text, str):
        return attrs.evolve(prompt, text=turns[0])
    named = zip(prompt.text, turns, strict=True)
    return attrs.evolve(prompt, text=tuple(Message(role=turn.role, content=text) for turn, text in named))


def text_parts(content: str) -> list[dict[str, str]]:
    """A turn without images."""
    return [{"type": "text", "text": content}]


def marked_parts(content: str) -> list[dict[str, str]]:
    """A turn, cut at its marks."""
    texts = [part for text in MARK.split(content) for part in (*text_parts(text), {"type": "image"})][:-1]
    return [part for part in texts if part.get("text", True)]
