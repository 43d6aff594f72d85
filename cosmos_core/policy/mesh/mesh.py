"""The device mesh of a replica: its processes along named axes, made once.

Processes are numbered with `pp` slowest, then `dp_replicate`, `dp_shard`, `cp`, and `tp` fastest, so that the axes
that talk most are nearest. Experts see the same processes as (pp, dp_replicate, expert_shard, ep): `ep` takes over
`tp`, then `cp`, then `dp_shard`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import get_args

import attrs
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cosmos_core.config.mesh import check_sizes, expert_shards, world_size
from cosmos_core.config.schema import MeshConfig
from cosmos_core.protocols.layout import Axis


@attrs.frozen(eq=False, slots=False)
class DeviceMeshes:
    """The arrangements of one replica's processes (see `protocols.layout.Mesh`).

    Attributes:
        sizes: Processes along each axis.
        rank: This process's number.
        dense: (pp, dp_replicate, fsdp, tp), of which `fsdp` is dp_shard · cp; None for a replica of one process.
        data: (pp, dp_replicate, dp_shard, cp, tp); None for a replica of one process.
        expert: (pp, dp_replicate, expert_shard, ep); None where `ep` is 1.
    """

    sizes: MeshConfig
    rank: int
    _dense: DeviceMesh | None = None
    _data: DeviceMesh | None = None
    _expert: DeviceMesh | None = None

    @property
    def world_size(self) -> int:
        """Processes of the replica."""
        return world_size(self.sizes)

    def size(self, axis: Axis) -> int:
        """Processes along an axis."""
        return int(getattr(self.sizes, axis))

    def place(self, axis: Axis) -> int:
        """This process's place on an axis."""
        return 0 if self.size(axis) == 1 else self.axis(axis).get_local_rank()

    @functools.cached_property
    def places(self) -> Mapping[str, int]:
        """This process's place on every axis."""
        return {axis: self.place(axis) for axis in get_args(Axis)}

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The processes that differ from this one on this axis only."""
        return self.axis(axis).get_group()

    def axis(self, axis: Axis) -> DeviceMesh:
        """The 1-D device mesh of an axis."""
        # FSDP wants the `tp` axis of its shards to be of the same mesh as its own.
        mesh = {"ep": self._expert, "dp_shard": self._data, "cp": self._data}.get(axis, self._dense)
        assert mesh is not None, f"the replica has no {axis} axis"
        return mesh[axis]

    @functools.cached_property
    def weights(self) -> DeviceMesh:
        """The mesh that FSDP shards dense weights over: `fsdp` is dp_shard · cp."""
        assert self._dense is not None
        return self._dense["fsdp"]

    @functools.cached_property
    def expert_weights(self) -> DeviceMesh:
        """The mesh that FSDP shards experts over."""
        assert self._expert is not None
        return self._expert["expert_shard"]


def single() -> DeviceMeshes:
    """A replica of one process; needs no process group."""
    return DeviceMeshes(MeshConfig(), 0)


def form_mesh(sizes: MeshConfig, device_type: str) -> DeviceMeshes:
    """Arrange the processes of the default process group.

    Args:
        sizes: Processes along each axis; their product is the group's size.
        device_type: `cpu` or `cuda`.

    Raises:
        ConfigError: The sizes do not fit together, or the group has another size.
    """
    check_sizes(sizes, dist.get_world_size() if dist.is_initialized() else 1)
    if world_size(sizes) == 1:
        return single()
    ends = sizes.pp, sizes.dp_replicate
    dense = init_device_mesh(
        device_type, (*ends, sizes.dp_shard * sizes.cp, sizes.tp), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
    )
    data = init_device_mesh(
        device_type,
        (*ends, sizes.dp_shard, sizes.cp, sizes.tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    )
    expert = None
    if sizes.ep > 1:
        expert = init_device_mesh(
            device_type,
            (sizes.pp, sizes.dp_replicate, expert_shards(sizes), sizes.ep),
            mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep"),
        )
    return DeviceMeshes(sizes, dist.get_rank(), dense, data, expert)
