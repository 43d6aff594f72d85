"""Images and videos of a prompt: what stands at their locations, and their marks and placeholders in its text.

`<image>` and `<video>` mark places, in the order of `Prompt.media`. Without any mark, all media stand before the text,
of a chat the first turn of the user. A prompt without media has no marks: there they are text as any other. Templates
of processors take turns as lists of parts; others do not. Turns that show images themselves (`Message.media`) say where
each stands, and marks are words there.

Media are local files and `data:` URLs. Nothing is fetched while training.
"""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import attrs
from PIL import Image, ImageOps, UnidentifiedImageError

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
    return attrs.evolve(prompt, text=tuple(attrs.evolve(turn, content=text) for turn, text in named))


SEEN: Final = "\U0010fffd"
"""Stands in the content of a turn for an image that it shows, a character that Unicode gives no meaning."""


def refuse_unseen(text: str | Sequence[Message]) -> None:
    """Refuse turns that show images, where nobody looks at them."""
    number = 0 if isinstance(text, str) else sum(len(turn.media) for turn in text)
    if number:
        raise DataError(f"the turns show {number} images, and this model is one of text; leave them out")


def shows_in_turns(prompt: Prompt) -> bool:
    """Tell whether turns of a chat show images themselves."""
    return not isinstance(prompt.text, str) and any(turn.media for turn in prompt.text)


def with_seen_marks(turns: Sequence[Message]) -> tuple[Message, ...]:
    """The turns, `SEEN` in their contents in the place of each image that they show.

    Raises:
        DataError: Their words have this character themselves, or places are none of the content.
    """
    return tuple(map(_with_seen_marks, turns))


def _with_seen_marks(turn: Message) -> Message:
    if SEEN in turn.content:
        raise DataError(f"the words {turn.content!r:.80} have the character {SEEN!r}, which stands for images; drop it")
    places = turn.places or (0,) * len(turn.media)
    bounds = [0, *places, len(turn.content)]
    if len(places) != len(turn.media) or sorted(bounds) != bounds:
        raise DataError(
            f"a turn of {len(turn.content)} characters shows {len(turn.media)} images at the places {list(places)}; "
            "give a place for each, in order, or none"
        )
    parts = [turn.content[start:stop] for start, stop in itertools.pairwise(bounds)]
    return attrs.evolve(turn, content=SEEN.join(parts), media=(), places=())


def in_turns(prompt: Prompt, kinds: Sequence[str]) -> Prompt:
    """A chat whose turns themselves show the media of its row, of these kinds (see `with_marks`)."""
    media, turns = iter(prompt.media), []
    for turn in with_marks(prompt, kinds).text:
        assert isinstance(turn, Message)
        marks = [mark.start() - n * len(mark.group()) for n, mark in enumerate(MARK.finditer(turn.content))]
        if not kinds or not marks:
            turns.append(turn)
            continue
        if turn.media:
            raise DataError("a turn shows images of its own, and media of the row; give all to the turns")
        content = MARK.sub("", turn.content)
        own = tuple(itertools.islice(media, len(marks)))
        turns.append(attrs.evolve(turn, content=content, media=own, places=tuple(marks)))
    return attrs.evolve(prompt, text=tuple(turns), media=())


def text_parts(content: str) -> list[dict[str, str]]:
    """A turn without images."""
    return [{"type": "text", "text": content}]


def marked_parts(content: str, mark: re.Pattern[str] = MARK) -> list[dict[str, str]]:
    """A turn, cut at its marks."""
    texts = [part for text in mark.split(content) for part in (*text_parts(text), {"type": "image"})][:-1]
    return [part for part in texts if part.get("text", True)]


IMAGE_ERRORS: Final = (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
"""What Pillow raises on what is no image."""

SHOWN: Final = 80
"""Characters of a `data:` URL that an error shows: it may have millions."""
_LONGEST_PATH: Final = 4096


def load_image(location: str) -> Image.Image:
    """The image at a path, a `file:` URL, or a `data:` URL, in RGB.

    Raises:
        DataError: There is none, it cannot be read, or it would have to be fetched.
    """
    if location.startswith("data:"):
        held = inline_bytes(location, "data:image/", "an image in base64, data:image/png;base64,…")
        return open_image(io.BytesIO(held), location)
    return open_image(local_file(location), location)


def open_image(
    source: Path | io.BytesIO, location: str, check: Callable[[int, int], None] | None = None
) -> Image.Image:
    """The image in a file, in RGB, upright: cameras write beside the pixels how to turn them.

    `check` is told its height and width as stored, and may refuse it before anything is decoded. A DataError says that
    it cannot be read.
    """
    try:
        with Image.open(source) as image:
            if check is not None:
                check(image.height, image.width)
            return ImageOps.exif_transpose(image).convert("RGB")
    except IMAGE_ERRORS as error:
        raise DataError(f"media {shown(location)}: no readable image: {error}") from error


def local_path(location: str) -> Path:
    """The path of a location that is no `data:` URL; a DataError says that it would have to be fetched."""
    if location.startswith("file:"):
        return Path(unquote(urlsplit(location).path))
    if "://" in location:
        raise DataError(f"media {shown(location)}: nothing is fetched while training; store it and give its path")
    return Path(location)


def local_file(location: str) -> Path:
    """The path of a location, at which a file is; a DataError says that there is none."""
    path = local_path(location)
    if not path.is_file():
        raise DataError(f"media {shown(location)}: no such file")
    return path


def inline_bytes(location: str, start: str, expected: str) -> bytes:
    """The content of a `data:` URL, which must begin with `start`; an error says what is expected."""
    head, _, data = location.partition(",")
    if not head.startswith(start) or not head.endswith(";base64"):
        raise DataError(f"media {shown(location)}: a data URL is {expected}")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise DataError(f"media {shown(location)}: no base64: {error}") from error


def shown(location: str) -> str:
    """A location as an error shows it."""
    most = SHOWN if location.startswith("data:") else _LONGEST_PATH
    return repr(location if len(location) <= most else f"{location[:most]}…")
