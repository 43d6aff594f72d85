"""The entry point `world-mock`: made-up videos, drawn from the run's seed.

Shape legend: F frames, H height, W width.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping
from typing import Any, Final

import attrs
import numpy as np
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.data import BadRowError
from cosmos_core.data.options import Template
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, Split, hookimpl
from cosmos_core.types import JSON, Prompt

COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (230, 51, 51),
    "green": (51, 230, 51),
    "blue": (51, 51, 230),
    "yellow": (204, 204, 51),
}
"""RGB of what prompts ask for."""

TINT: Final = 0.35
"""How much of its colour a video has, so that there is something left to learn from rewards."""

_MAX_VIDEO_BYTES: Final = 1 << 20


def _is_template(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    try:
        Template(value).fill({"colour": ""})
    except (ValueError, BadRowError) as error:
        raise ValueError(f"{attribute.name}: {error}") from error


@attrs.frozen(kw_only=True)
class MockOptions:
    """The number of videos, and their size."""

    prompt: str = option(
        "{colour}",
        help="Template of the prompt, `{colour}` standing for the name of the colour.",
        validator=_is_template,
    )
    frames: int = option(8, help="Frames of a video.", validator=check.ge(1))
    height: int = option(8, help="In pixels.", validator=check.ge(2))
    width: int = option(8, help="In pixels.", validator=check.ge(2))
    fps: float = option(8.0, help="Frames a second.", validator=check.gt(0.0))
    given_frames: int = option(0, help="How many first frames the model is given.", validator=check.ge(0))
    train_rows: int = option(512, help="Rows of the train split.", validator=check.ge(1))
    heldout_rows: int = option(64, help="Rows of the held-out split.", validator=check.ge(0))

    def __attrs_post_init__(self) -> None:
        if self.given_frames >= self.frames:
            raise ValueError(
                f"`given_frames` is {self.given_frames}, and a video has {self.frames} `frames`; give fewer"
            )
        size = self.frames * self.height * self.width * 3
        if size > _MAX_VIDEO_BYTES:
            raise ValueError(
                f"`frames`, `height` and `width` make videos of {size:,} bytes, more than {_MAX_VIDEO_BYTES:,}, and "
                "rows hold them; use fewer, or a folder of videos"
            )


class WorldMock:
    """The dataset: row i is of colour i modulo 4; its video has a little of it, and a square that moves."""

    def __init__(self, options: MockOptions, context: DatasetContext) -> None:
        self._options: Final = options
        self._seed: Final = context.seed
        self._template: Final = Template(options.prompt)

    def size(self, split: Split) -> int:
        """Number of rows."""
        return self._options.train_rows if split == "train" else self._options.heldout_rows

    def row(self, split: Split, index: int) -> Prompt:
        """Draw row `index` of the split.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"world-mock: row {index} of split {split!r}, which has {self.size(split)}")
        options = self._options
        colour = list(COLOURS)[index % len(COLOURS)]
        # A string seeds by its SHA-512, so a row is the same in every process.
        seed = random.Random(f"{self._seed}:{split}:{index}").getrandbits(64)  # noqa: S311 - rows, not secrets
        video = draw_video(np.random.default_rng(seed), COLOURS[colour], options.frames, options.height, options.width)
        metadata: dict[str, JSON] = {
            "colour": colour,
            "num_frames": options.frames,
            "fps": options.fps,
            "height": options.height,
            "width": options.width,
        }
        if options.given_frames:
            metadata["num_given_frames"] = options.given_frames
        return Prompt(
            text=self._template.fill({"colour": colour}),
            reference=list(COLOURS[colour]),
            demonstration=data_url(video),
            media=(data_url(video[: options.given_frames]),) if options.given_frames else (),
            metadata=metadata,
        )


def draw_video(
    rng: np.random.Generator, colour: tuple[int, int, int], frames: int, height: int, width: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A video of a tint, with noise and a brighter square that moves to the right by a pixel a frame.

    Args:
        rng: What is drawn from.
        colour: RGB, of which it has a part (`TINT`).
        frames: How many.
        height: In pixels.
        width: In pixels.

    Returns:
        uint8 [F, H, W, 3].
    """
    goal = np.asarray(colour, dtype=np.float64) / 127.5 - 1.0
    tint = TINT * goal + 0.25 * rng.standard_normal(3)
    video = tint + 0.05 * rng.standard_normal((frames, height, width, 3))
    side = max(1, 3 * min(height, width) // 8)
    top, left = int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1))
    for frame in range(frames):
        start = (left + frame) % (width - side + 1)
        video[frame, top : top + side, start : start + side] += 0.4
    return np.rint((video.clip(-1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)


def data_url(video: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """Frames, uint8 [F, H, W, 3], as a location of their own."""
    buffer = io.BytesIO()
    np.save(buffer, video, allow_pickle=False)
    return f"data:application/x-npy;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide made-up videos."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True)
    return Provider(create=WorldMock, options=MockOptions, capabilities=capabilities)
