"""Reward `ocr`: whether the text that the prompt asks for can be read in the frames."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any, Final

import attrs
import numpy as np
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardContext, Score, hookimpl
from cosmos_core.types import Prompt
from cosmos_reward_vision.frames import CAPABILITIES, Frames, frames_of, some_of, text_of

_QUOTED: Final = re.compile(r'"([^"]+)"|\u201c([^\u201d]+)\u201d')
_SHOWN_CHARACTERS: Final = 200
_READER: Final = "rapidocr_onnxruntime"
_NOT_INSTALLED: Final = 'what reads text is not installed ({}); pip install "cosmos-reward-vision[ocr]"'


@attrs.frozen(kw_only=True)
class OcrOptions:
    """Options of `ocr`."""

    frames: int = option(4, help="Most frames that are read, spread evenly.", validator=check.ge(1))
    least: float = option(
        0.5, help="Confidence from which read text counts.", validator=check.and_(check.ge(0.0), check.le(1.0))
    )


class Ocr:
    """max(0, 1 - edits / length of the text that is asked for), averaged over frames; case and spaces do not count.

    Source: Flow-GRPO, arXiv 2505.05470, section 5.1 (visual text rendering). Deviation: averaged over frames.
    """

    def __init__(self, options: OcrOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name
        self._read: Callable[[Frames], str] | None = None

    def absent(self) -> str:
        """The sentence about the reader, where it is not installed."""
        return "" if importlib.util.find_spec(_READER) is not None else _NOT_INSTALLED.format(f"no module {_READER!r}")

    def load(self) -> None:
        """Load what reads.

        Raises:
            ConfigError: It is not installed.
        """
        try:
            import rapidocr_onnxruntime  # type: ignore[import-not-found, unused-ignore] # noqa: PLC0415 - it is optional
        except ImportError as error:
            raise ConfigError(_NOT_INSTALLED.format(error)) from error
        reader: Any = rapidocr_onnxruntime.RapidOCR()

        def read(frame_HWC: Frames) -> str:
            # It takes the channels of OpenCV, blue first.
            found, _ = reader(np.ascontiguousarray(frame_HWC[..., ::-1]))
            return " ".join(text for _, text, sure in found or () if float(sure) >= self._options.least)

        self._read = read

    def vet(self, prompt: Prompt) -> None:
        """Look for the text that is asked for.

        Raises:
            DataError: There is none.
        """
        self._asked(prompt)

    def score(self, completion: Completion) -> Score:
        """Read the frames.

        Raises:
            DataError: It is not told which text is asked for, or nothing was rendered.
        """
        assert self._read is not None
        asked = _plain(self._asked(completion.prompt))
        frames_FHWC = some_of(frames_of(completion, self._name), self._options.frames)
        read = [self._read(each) for each in frames_FHWC]
        values = [max(0.0, 1.0 - edits(_plain(text), asked) / len(asked)) for text in read]
        return Score(value=sum(values) / len(values), details={"read": read[-1][:_SHOWN_CHARACTERS]})

    def _asked(self, prompt: Prompt) -> str:
        reference = prompt.reference
        if reference is None:
            reference = " ".join(first or second for first, second in _QUOTED.findall(text_of(prompt)))
        if not isinstance(reference, str) or not _plain(reference):
            raise DataError(
                f"reward {self._name}: the row tells no text to read: its reference is {prompt.reference!r:.100}, and "
                f'its prompt {text_of(prompt)!r:.100} has nothing in "double quotes"; give it one of them'
            )
        return reference


def edits(first: str, second: str) -> int:
    """Fewest characters to insert, delete or replace to make one text of the other."""
    before = list(range(len(second) + 1))
    for row, mine in enumerate(first, 1):
        now = [row]
        for column, theirs in enumerate(second, 1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (mine != theirs)))
        before = now
    return before[-1]


def _plain(text: str) -> str:
    return "".join(text.casefold().split())


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the reading."""
    return Provider(create=Ocr, options=OcrOptions, capabilities=CAPABILITIES)
