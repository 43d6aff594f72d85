"""Options of all datasets of clips: what a row needs, and how large it may be."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.data import RowsOptions


@attrs.frozen(kw_only=True)
class ClipOptions(RowsOptions):
    """The making of rows from clips. A plugin's own options inherit it, and add where clips are."""

    demonstrations: bool = option(
        True,
        help="Whether the video is what to imitate; without, rows have a caption, and a video only if it is given.",
    )
    given: Literal["nothing", "image", "frames"] = option(
        "nothing",
        help="What the model is given to go on from: nothing, a picture of its own, or the first frames of the video.",
    )
    given_frames: int = option(
        1, help='How many frames of the video are given, with `given = "frames"`.', validator=check.ge(1)
    )
    embeddings: Literal["ignored", "optional", "required"] = option(
        "optional", help="Whether rows have embeddings of their captions, so that no text encoder runs."
    )
    embedding_width: int | None = option(
        None,
        help="Width of the embeddings that the model takes; another width makes a bad row.",
        validator=check.optional(check.ge(1)),
    )
    pickles: bool = option(
        False,
        help="Whether embeddings may be pickles. They are read by an unpickler that makes arrays and nothing else.",
    )
    check_videos: Literal["packets", "frames", "never"] = option(
        "packets",
        help="`packets` decodes the first frame of a video and reads all of its packets; `frames` decodes every frame; "
        "`never` looks at sizes alone, and needs no PyAV.",
    )
    min_frames: int = option(1, help="A shorter video makes a bad row.", validator=check.ge(1))
    max_frames: int | None = option(None, help="A longer video makes a bad row.", validator=check.optional(check.ge(1)))
    max_pixels: int | None = option(
        None, help="A video of more pixels a frame makes a bad row.", validator=check.optional(check.ge(1))
    )
    max_video_bytes: int = option(1 << 30, help="A larger file makes a bad row.", validator=check.ge(1))
    max_cache_bytes: int = option(
        20 << 30,
        help="Size of the local copies of what is in tars, or is converted; the oldest are removed, but not those that "
        "were read in the last quarter of an hour. They are in `$COSMOS_CACHE`, or `~/.cache/cosmos`.",
        validator=check.ge(1),
    )

    def __attrs_post_init__(self) -> None:
        RowsOptions.__attrs_post_init__(self)
        if self.check_videos == "never":
            lengths = (self.min_frames > 1, self.max_frames is not None, self.max_pixels is not None)
            if any(lengths):
                raise ValueError('`min_frames`, `max_frames` and `max_pixels` need `check_videos`, and it is "never"')
        if self.max_frames is not None and self.max_frames < self.min_frames:
            raise ValueError(f"`max_frames` is {self.max_frames}, less than `min_frames`, {self.min_frames}")
        if self.given_frames > 1 and self.given != "frames":
            raise ValueError('`given_frames` needs `given = "frames"`')
        if self.embedding_width is not None and self.embeddings == "ignored":
            raise ValueError('`embedding_width` needs embeddings, and they are "ignored"')

    @property
    def needs_video(self) -> bool:
        """True if a clip without a video is a bad row."""
        return self.demonstrations or self.given == "frames"
