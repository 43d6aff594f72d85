"""The entry point `world-webdataset`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from cosmos_core.data import RowsDataset, RowSource, expand, find_files
from cosmos_core.errors import DataError
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, hookimpl
from cosmos_core.storage import file_system, is_url, told
from cosmos_dataset_world.clips import ClipMapping, copies
from cosmos_dataset_world.clips.probing import Prober
from cosmos_dataset_world.webdataset.source import ClipTar, WebDatasetOptions

_RANGE: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_TARS: Final = 1_000_000


class WorldWebDataset(RowsDataset):
    """The dataset.

    Raises:
        ConfigError: PyAV is needed and not installed.
        DataError: There is no such tar, it has no usable clip, or a clip is bad (tar, name, reason).
        StorageError: A tar cannot be read.
    """

    def __init__(self, options: WebDatasetOptions, context: DatasetContext) -> None:
        cache = copies(options)
        mapping = ClipMapping(options, Prober(options.check_videos, context.key_path), cache)

        def clips(name: str, value: str) -> list[RowSource]:
            found = find_tars(f"{context.key_path}.{name}", value, context.directory)
            return [ClipTar(url, options, mapping, cache) for url in found]

        super().__init__(
            "world-webdataset",
            options,
            mapping,
            train=clips("train", options.train),
            heldout=None if options.heldout is None else clips("heldout", options.heldout),
            key_path=context.key_path,
        )


def find_tars(key: str, value: str, directory: Path) -> list[str]:
    """The tars that an option names, in order.

    Args:
        key: Key path of the option, for error messages.
        value: Path or URL, with `${NAME}`, ranges such as `{00..63}`, and globs.
        directory: Where relative paths start.

    Raises:
        DataError: There is no such file.
        StorageError: The store cannot be listed.
    """
    found = []
    for each in _in_ranges(expand(key, value), key):
        if is_url(each):
            found += _in_store(each, key)
        else:
            found += [str(path.absolute()) for path in find_files(key, each, directory)]
    return found


def _in_ranges(value: str, key: str) -> list[str]:
    match = _RANGE.search(value)
    if match is None:
        return [value]
    first, last, width = int(match[1]), int(match[2]), len(match[1])
    if not 0 <= last - first < _MAX_TARS:
        raise DataError(f"{key}: the range {match[0]} counts down, or is too long")
    filled = (f"{value[: match.start()]}{number:0{width}}{value[match.end() :]}" for number in range(first, last + 1))
    return [each for one in filled for each in _in_ranges(one, key)]


def _in_store(url: str, key: str) -> list[str]:
    if not any(sign in url for sign in "*?["):
        return [url]
    with told(url):
        store, pattern = file_system(url)
        store.invalidate_cache()
        found = [store.unstrip_protocol(path) for path in sorted(store.glob(pattern))]
    if not found:
        raise DataError(f"{key}: no file at {url}")
    return found


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide WebDataset tars of clips."""
    capabilities = DatasetCapabilities(demonstrations=True, references=False)
    return Provider(create=WorldWebDataset, options=WebDatasetOptions, capabilities=capabilities)
