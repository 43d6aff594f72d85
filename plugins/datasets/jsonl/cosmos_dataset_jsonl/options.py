"""Options of `jsonl`."""

from __future__ import annotations

import attrs

from cosmos_core.config import option
from cosmos_core.data import FieldOptions


@attrs.frozen(kw_only=True)
class JsonlOptions(FieldOptions):
    """The files, the making of prompts from their rows, and the rows held out."""

    train: str = option(
        help="File of the train split, `.jsonl` or `.parquet`; a glob takes several, in order of their names. "
        "`${NAME}` and `${NAME:-default}` stand for environment variables; a relative path starts at the recipe."
    )
    heldout: str | None = option(None, help="File or glob of the held-out split.")

    def __attrs_post_init__(self) -> None:
        FieldOptions.__attrs_post_init__(self)
        if self.heldout is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")
