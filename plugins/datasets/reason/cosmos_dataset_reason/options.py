"""Options of `reason`."""

from __future__ import annotations

from typing import Literal

import attrs

from cosmos_core.config import option
from cosmos_core.data import RowsOptions


# Without slots it can be one of several bases.
@attrs.frozen(kw_only=True, slots=False)
class QuestionOptions:
    """The way of asking."""

    thought: bool = option(
        True, help="Whether answers are asked for as `<think>…</think> <answer>…</answer>`, and not as a bare answer."
    )
    instruction: str | None = option(
        None,
        help="What stands below a question and its choices; a line that asks for a letter, and one that asks for tags, "
        "each where it applies, if absent.",
    )
    chat: bool = option(True, help="Whether a question is a user's turn, for the model's chat template.")
    system: str | None = option(None, help="A system turn to begin every chat with.")

    def __attrs_post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise ValueError("`system` needs `chat = true`: a plain text question has no turns")


@attrs.frozen(kw_only=True)
class ReasonOptions(RowsOptions, QuestionOptions):
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
    demonstrations: Literal["required", "optional"] = option(
        "optional",
        help="Whether a train question without a demonstration is a bad row: `required` where a stage imitates them.",
    )

    def __attrs_post_init__(self) -> None:
        RowsOptions.__attrs_post_init__(self)
        QuestionOptions.__attrs_post_init__(self)
        if self.heldout is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")
