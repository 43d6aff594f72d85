"""Where local copies of clips are."""

from __future__ import annotations

from cosmos_core.storage import LocalCache, cache_folder
from cosmos_dataset_world.clips.options import ClipOptions


def copies(options: ClipOptions) -> LocalCache:
    """The folder that all datasets of clips of this user share."""
    return LocalCache(cache_folder() / "world" / "copies", options.max_cache_bytes)
