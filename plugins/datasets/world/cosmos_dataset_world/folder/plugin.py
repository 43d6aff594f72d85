"""The entry point `world-folder`."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.data import RowsDataset, RowSource, expand
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, hookimpl
from cosmos_dataset_world.clips import ClipMapping, copies
from cosmos_dataset_world.clips.probing import Prober
from cosmos_dataset_world.folder.source import ClipFolder, FolderOptions


class WorldFolder(RowsDataset):
    """The dataset.

    Raises:
        ConfigError: PyAV is needed and not installed.
        DataError: A folder is missing or has no usable clip, or a clip is bad (folder, name, reason).
    """

    def __init__(self, options: FolderOptions, context: DatasetContext) -> None:
        prober = Prober(options.check_videos, context.key_path)

        def clips(name: str, value: str) -> list[RowSource]:
            key = f"{context.key_path}.{name}"
            folder = (context.directory / Path(expand(key, value)).expanduser()).absolute()
            return [ClipFolder(folder, options, prober)]

        super().__init__(
            "world-folder",
            options,
            ClipMapping(options, prober, copies(options)),
            train=clips("train", options.train),
            heldout=None if options.heldout is None else clips("heldout", options.heldout),
            key_path=context.key_path,
        )


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide local folders of clips."""
    capabilities = DatasetCapabilities(demonstrations=True, references=False)
    return Provider(create=WorldFolder, options=FolderOptions, capabilities=capabilities)
