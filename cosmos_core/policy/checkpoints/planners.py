"""Tells torch's checkpoints what one process holds: boxes of tensors by name, whatever layout they come from.

Torch knows the layouts of its own tensors. Boxes are simpler: what was saved as some boxes can be read as any others,
by one process alone, and what several processes hold is written by one of them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from cosmos_core.weights.held import Held


class UnlikeError(ValueError):
    """What was saved is not what is to be read: another model's."""


class SharesToSave(DefaultSavePlanner):
    """Plans to write shares of tensors.

    Args:
        shares: What this process holds, by name; empty shares are left out.
    """

    def __init__(self, shares: Mapping[str, Held]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shares = shares

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002 - torch's signature
        is_coordinator: bool = False,
    ) -> None:
        """Take note of who leads."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item a share."""
        self.plan = SavePlan([_item(name, share) for name, share in self._shares.items() if share.tensor.numel()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The bytes of an item."""
        return self._shares[write_item.index.fqn].tensor


class SharesToLoad(DefaultLoadPlanner):
    """Plans to read shares of tensors, in place.

    Args:
        shares: What this process holds, by name.
    """

    def __init__(self, shares: Mapping[str, Held]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shares = shares

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take note of what was saved."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The parts of saved boxes that make up each share.

        Raises:
            UnlikeError: A tensor was not saved, or with another shape.
        """
        assert self.metadata is not None
        items = []
        for name, share in self._shares.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise UnlikeError(f"it lacks {name}")
            if tuple(entry.size) != share.placement.shape:
                raise UnlikeError(f"{name} has shape {tuple(entry.size)} there and {share.placement.shape} here")
            if share.tensor.numel():
                items += create_read_items_for_chunk_list(name, entry, [_chunk(share)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Where an item goes."""
        return self._shares[index.fqn].tensor


def _chunk(share: Held) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(share.placement.start), sizes=share.tensor.shape)


def _item(name: str, share: Held) -> WriteItem:
    chunk = _chunk(share)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(share.tensor),
            size=torch.Size(share.placement.shape),
        ),
    )
