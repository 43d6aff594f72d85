"""Options of `huggingface`."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cosmos_core.config import option
from cosmos_core.data import FieldOptions


@attrs.frozen(kw_only=True)
class HuggingFaceOptions(FieldOptions):
    """The dataset and its splits, the making of prompts from rows, and the rows held out."""

    path: str = option(
        help="Name on the Hub, a folder made by `save_to_disk`, or a builder such as `parquet` with `data_files`. "
        "`${NAME}` and `${NAME:-default}` stand for environment variables; a relative path starts at the recipe."
    )
    name: str | None = option(None, help="Configuration of the dataset, where it has several.")
    revision: str | None = option(None, help="Commit or tag on the Hub; name one, so that a run can be repeated.")
    data_files: Mapping[str, tuple[str, ...]] = option(
        factory=dict, help="Files of each split, for a builder; relative paths start at the recipe."
    )
    split: str = option("train", help="The train split; on the Hub and of builders slices, too, such as `train[:90%]`.")
    heldout_split: str | None = option(None, help="The held-out split.")

    def __attrs_post_init__(self) -> None:
        FieldOptions.__attrs_post_init__(self)
        if self.heldout_split is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout_split`, `heldout_rows` and `heldout_fraction`")
