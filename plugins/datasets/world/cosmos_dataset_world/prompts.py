"""The entry point `world-prompts`: prompts alone, of text files and JSONL files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.data import (
    FieldMapping,
    FieldOptions,
    JsonLinesFile,
    LinesFile,
    RowsDataset,
    RowsOptions,
    RowSource,
    find_files,
)
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, hookimpl
from cosmos_core.types import Prompt


@attrs.frozen(kw_only=True)
class PromptsOptions(RowsOptions):
    """The files, and the fields of JSONL files that make a row."""

    train: str = option(
        help="File of the train prompts: `.jsonl`, or any other with one prompt a line; a glob takes several. "
        "`${NAME}` and `${NAME:-default}` stand for environment variables; a relative path starts at the recipe."
    )
    heldout: str | None = option(None, help="File or glob of the held-out prompts.")
    field: str = option("prompt", help="Field of a JSONL row with the prompt.", validator=check.min_len(1))
    reference: str | None = option(None, help="Field of a JSONL row that rewards compare with.")
    media: str | None = option(None, help="Field of a JSONL row with the image or video that the model is given.")
    given_frames: int = option(
        1, help="How many frames the model is given of what `media` names.", validator=check.ge(1)
    )
    metadata: tuple[str, ...] = option((), help="Fields of a JSONL row that are kept with it.")

    def __attrs_post_init__(self) -> None:
        RowsOptions.__attrs_post_init__(self)
        if self.heldout is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")
        if self.given_frames > 1 and self.media is None:
            raise ValueError("`given_frames` needs `media`")


class PromptMapping:
    """A row's prompt, with what the model is given."""

    def __init__(self, options: PromptsOptions) -> None:
        self._fields = FieldMapping(
            FieldOptions(
                prompt=f"{{{options.field}}}",
                reference=options.reference,
                media=options.media,
                metadata=options.metadata,
            )
        )
        self._given_frames = options.given_frames

    def prompt(self, row: Any, folder: Path) -> Prompt:
        """The prompt of a row.

        Raises:
            BadRowError: A field is missing or empty, or names a file that is not there.
        """
        prompt = self._fields.prompt(row, folder)
        if not prompt.media:
            return prompt
        return attrs.evolve(prompt, metadata={**prompt.metadata, "num_given_frames": self._given_frames})


class TextLines(LinesFile):
    """A text file with one prompt a line, each a row of one `field`."""

    def __init__(self, path: Path, field: str) -> None:
        super().__init__(path)
        self._field = field

    def parse(self, line: str) -> tuple[dict[str, str], str]:
        """The row of a line."""
        return {self._field: line.strip()}, ""


class WorldPrompts(RowsDataset):
    """The dataset.

    Raises:
        DataError: A file is missing, unreadable or empty, or has a bad row (file, line, reason).
    """

    def __init__(self, options: PromptsOptions, context: DatasetContext) -> None:
        def files(name: str, value: str) -> list[RowSource]:
            found = find_files(f"{context.key_path}.{name}", value, context.directory)
            return [
                JsonLinesFile(path) if path.suffix == ".jsonl" else TextLines(path, options.field) for path in found
            ]

        super().__init__(
            "world-prompts",
            options,
            PromptMapping(options),
            train=files("train", options.train),
            heldout=None if options.heldout is None else files("heldout", options.heldout),
            key_path=context.key_path,
        )


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide prompts of world models."""
    capabilities = DatasetCapabilities(demonstrations=False, references=True)
    return Provider(create=WorldPrompts, options=PromptsOptions, capabilities=capabilities)
