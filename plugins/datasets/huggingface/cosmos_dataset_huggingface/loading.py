"""Finding a dataset: saved to disk, or by the `datasets` library's own loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from cosmos_core.data import expand
from cosmos_core.errors import DataError
from cosmos_core.protocols import DatasetContext
from cosmos_dataset_huggingface.options import HuggingFaceOptions

SAVED: Final = ("dataset_dict.json", "dataset_info.json", "state.json")
"""What `save_to_disk` leaves in a folder, one or the other."""


def saved_folder(options: HuggingFaceOptions, context: DatasetContext) -> Path | None:
    """The folder of a dataset that was saved to disk; None if the recipe names none.

    Args:
        options: Of the dataset.
        context: Where relative paths start, and where the options are.

    Raises:
        DataError: An environment variable is not set.
    """
    folder = context.directory / Path(expand(f"{context.key_path}.path", options.path)).expanduser()
    return folder if any((folder / name).is_file() for name in SAVED) else None


def load_split(options: HuggingFaceOptions, split: str, context: DatasetContext) -> Any:
    """One split as a `datasets.Dataset`, which maps its rows from files and reads none yet.

    Raises:
        DataError: There is no such dataset or split, it cannot be read, or the Hub cannot be reached.
    """
    import datasets  # noqa: PLC0415 - takes a second to import

    errors = (OSError, ValueError, KeyError, TypeError, RuntimeError, datasets.exceptions.DatasetsError)
    folder = saved_folder(options, context)
    try:
        if folder is not None:
            return _of_saved(datasets.load_from_disk(str(folder)), split, folder, context)
        key = f"{context.key_path}.data_files"
        files = {
            name: [str(context.directory / Path(expand(key, file)).expanduser()) for file in listed]
            for name, listed in options.data_files.items()
        }
        return datasets.load_dataset(
            expand(f"{context.key_path}.path", options.path),
            options.name,
            data_files=files or None,
            revision=options.revision,
            split=split,
        )
    except errors as error:
        raise DataError(
            f"{context.key_path}.path: split {split!r} of {options.path!r} cannot be loaded: "
            f"{type(error).__name__}: {str(error).strip():.400}; no folder of `save_to_disk` is at "
            f"{context.directory} either; check path, name, revision and split"
        ) from error


def _of_saved(saved: Any, split: str, folder: Path, context: DatasetContext) -> Any:
    """The split of what was saved: of a dictionary of splits the one of this name, a lone dataset as `train`."""
    splits = saved if isinstance(saved, dict) else {"train": saved}
    if split not in splits:
        raise DataError(
            f"{folder}: no split {split!r}; it has {', '.join(map(repr, splits))}. To hold rows out of one split, set "
            f"{context.key_path}.heldout_rows"
        )
    return splits[split]
