"""Reward `colour`: how near the mean colour is to the one that the prompt asks for."""

from __future__ import annotations

import re
from typing import Final

import attrs
import numpy as np
from PIL import ImageColor

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardContext, Score, hookimpl
from cosmos_core.types import JSON, Prompt
from cosmos_reward_vision.frames import CAPABILITIES, frames_of, mean_of, text_of

_WORDS: Final = (
    *("red", "green", "blue", "yellow", "cyan", "magenta", "orange", "purple", "pink", "brown"),
    *("black", "white", "grey", "gray"),
)
"""Colours that are looked for in prompts; other names of CSS are things, too (`tomato`, `snow`)."""

_WORD: Final = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)


@attrs.frozen(kw_only=True)
class ColourOptions:
    """Options of `colour`: there are none."""


class Colour:
    """Minus the Euclidean distance of the mean colour of all pixels from the one that is asked for.

    Channels go from -1 to 1, as video models see them: the value is 0 at best, and -2 sqrt(3) at worst.
    """

    def __init__(self, options: ColourOptions, context: RewardContext) -> None:  # noqa: ARG002 - the kind's signature
        self._name: Final = context.name

    def vet(self, prompt: Prompt) -> None:
        """Look for the colour.

        Raises:
            DataError: It is not told, or more than one is.
        """
        self._asked(prompt)

    def score(self, completion: Completion) -> Score:
        """Compare the mean colour.

        Raises:
            DataError: It is not told which colour is asked for, or nothing was rendered.
        """
        asked_C = np.array(self._asked(completion.prompt), np.float64) / 127.5 - 1.0
        mean_C = mean_of(frames_of(completion, self._name)) / 127.5 - 1.0
        shown: list[JSON] = [round(float(each), 3) for each in mean_C]
        return Score(value=-float(np.linalg.norm(mean_C - asked_C)), details={"mean": shown})

    def _asked(self, prompt: Prompt) -> tuple[float, float, float]:
        """Red, green and blue, 0 to 255."""
        if prompt.reference is not None:
            return self._read(prompt.reference)
        text = text_of(prompt)
        words = {word.lower().replace("gray", "grey") for word in _WORD.findall(text)}
        if len(words) != 1:
            seen = f"names {' and '.join(sorted(words))}" if words else "names no colour"
            raise DataError(
                f"reward {self._name}: the prompt {text!r:.100} {seen}; name one of {', '.join(_WORDS)}, or give the "
                "row a reference such as 'teal', '#008080' or [0, 128, 128]"
            )
        return self._read(words.pop())

    def _read(self, reference: JSON) -> tuple[float, float, float]:
        found = _named(reference) if isinstance(reference, str) else _channels(reference)
        if found is None:
            raise DataError(
                f"reward {self._name}: the reference {reference!r:.100} is no colour; give a name or '#rrggbb' as CSS "
                "has them, or [red, green, blue] of 0 to 255"
            )
        return found


def _named(name: str) -> tuple[float, float, float] | None:
    try:
        red, green, blue = ImageColor.getrgb(name)[:3]
    except ValueError:
        return None
    return red, green, blue


def _channels(reference: JSON) -> tuple[float, float, float] | None:
    if not isinstance(reference, list) or len(reference) != 3:
        return None
    numbers = [float(each) for each in reference if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) != 3 or not all(0.0 <= each <= 255.0 for each in numbers):
        return None
    return numbers[0], numbers[1], numbers[2]


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the colour."""
    return Provider(create=Colour, options=ColourOptions, capabilities=CAPABILITIES)
