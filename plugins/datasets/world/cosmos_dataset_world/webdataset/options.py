"""Options of `world-webdataset`."""

from __future__ import annotations

import re
from typing import Any, Final

import attrs

from cosmos_core.config import option
from cosmos_dataset_world.clips import ClipOptions

_CAPTION: Final = re.compile(r"[\w.-]+(:\w+)?")


def _is_caption(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not _CAPTION.fullmatch(value):
        raise ValueError(f"{attribute.name}: {value!r}; give an extension such as `txt`, or `json:FIELD`")


@attrs.frozen(kw_only=True)
class WebDatasetOptions(ClipOptions):
    """The tars, and the members that are captions."""

    train: str = option(
        help="Path or URL of the train tars, such as `s3://bucket/clips/{000000..000063}.tar`; braces and globs take "
        "several. `${NAME}` and `${NAME:-default}` stand for environment variables; a relative path starts at the "
        "recipe."
    )
    heldout: str | None = option(None, help="Path or URL of the held-out tars.")
    caption: str = option(
        "txt",
        help="Extension of the members with captions; `json:FIELD` for a field of JSON members.",
        validator=_is_caption,
    )

    def __attrs_post_init__(self) -> None:
        ClipOptions.__attrs_post_init__(self)
        if self.heldout is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")
