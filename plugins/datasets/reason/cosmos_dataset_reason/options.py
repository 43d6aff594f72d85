"""Options of `reason`."""

from __future__ import annotations

from typing import Literal

import attrs

from cosmos_core.config import option
from cosmos_core.data import RowsOptions


@attrs.frozen(kw_only=True)
class ReasonOptions(RowsOptions):
    """The files of questions, the folder of their videos, and the way of asking."""

    train: str = option(
        help="JSONL file of the train questions; a glob takes several, in order of their names. `${NAME}` and "
        "`${NAME:-default}` stand for environment variables; a relative path starts at the recipe."
    )
    heldout: str | None = option(None, help="File or glob of the held-out questions, such as a benchmark.")
    media_folder: str | None = option(
        None, help="Where relative paths of videos and images start; the folder of the questions' file if absent."
    )
    labels: Literal["required", "optional"] = option(
        "optional", help="Whether a question without a label of the ontologies is a bad row. An unknown one always is."
    )
    thought: bool = option(
        True, help="Whether answers are asked for as `<think>…</think> <answer>…</answer>`, and not as a bare answer."
    )
    chat: bool = option(True, help="Whether a question is a user's turn, for the model's chat template.")
    system: str | None = option(None, help="A system turn to begin every chat with.")

    def __attrs_post_init__(self) -> None:
        RowsOptions.__attrs_post_init__(self)
        if self.heldout is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")
        if self.system is not None and not self.chat:
            raise ValueError("`system` needs `chat = true`: a plain text question has no turns")
