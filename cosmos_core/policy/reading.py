"""Reads checkpoints as data.

torch describes a checkpoint (`.metadata`) in a pickle, which may name any function to be called, and may declare parts
of it to be pickles, too. Here only what a description of tensors consists of is let through, so that a checkpoint from
a stranger can be wrong, but cannot run anything.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader  # its documented home
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_DESCRIPTION: Final = "torch.distributed.checkpoint.metadata"
_ALLOWED: Final = frozenset(
    {
        *((_DESCRIPTION, name) for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
        *((_DESCRIPTION, name) for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
)


class CheckpointReader(FsspecReader):
    """Reads the tensors of a checkpoint at a path or fsspec URL."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the checkpoint holds.

        Raises:
            OSError: It cannot be read.
            pickle.UnpicklingError: It is damaged, or names what no description of tensors needs.
        """
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            metadata: Metadata = _Description(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Description(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its description names {module}.{name}, which no tensor needs; it is not trusted")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
