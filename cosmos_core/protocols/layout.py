"""Layout of a replica's weights and work over its processes, as a model plugin is told it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import attrs

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

Axis: TypeAlias = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
ContextMethod: TypeAlias = Literal["auto", "ulysses", "gather", "ring"]
Recompute: TypeAlias = Literal["none", "selective", "full"]
Float8: TypeAlias = Literal["none", "tensorwise", "rowwise"]


class Mesh(Protocol):
    """The processes of one replica, arranged along named axes.

    Every process has a place on each of `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`. Experts have a second
    arrangement of the same processes, in which `ep` runs over `tp`, then `cp`, then `dp_shard`: what these three hold
    is split into `ep` groups of experts and `expert_shard` shards of each.
    """

    @property
    def rank(self) -> int:
        """This process's place in the replica."""

    @property
    def world_size(self) -> int:
        """Processes of the replica."""

    def size(self, axis: Axis) -> int:
        """Processes along an axis."""

    def place(self, axis: Axis) -> int:
        """This process's place on an axis."""

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The processes that differ from this one on this axis only; for axes greater than 1."""

    @property
    def weights(self) -> DeviceMesh:
        """The mesh over which FSDP shards dense weights: 1-D, `fsdp` (dp_shard · cp)."""

    @property
    def expert_weights(self) -> DeviceMesh:
        """The mesh over which FSDP shards experts: 1-D, `expert_shard`."""

    def axis(self, axis: Axis) -> DeviceMesh:
        """The 1-D device mesh of an axis."""


@attrs.frozen(kw_only=True)
class Lora:
    """Low-rank adapters in place of the weights themselves.

    Attributes:
        rank: Their rank.
        alpha: Their scale is alpha / rank.
        modules: Last parts of the names of the linear layers that get one; `all-linear` is every one but the output.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """A mesh, and what else decides how a module is made.

    Attributes:
        mesh: The processes.
        micro_batch_precision: Compute dtype of sharded weights, `float64` in tests; gradients have float32 at least.
        sequence_parallel: Whether activations between blocks are split over `tp`.
        context: How attention over `cp` is computed.
        stages_per_rank: Pipeline stages that each process holds.
        is_v_shaped: Whether a process that holds two stages has the first and the last, instead of every `pp`-th.
        reshard_after_forward: Whether FSDP frees gathered weights between forward and backward.
        recompute: What the backward pass recomputes.
        offload_activations: Whether what layers save for their backward pass waits in the machine's memory.
        cpu_offload: Whether weights, gradients and optimizer stay in the CPU's memory.
        compile: Whether each layer is compiled.
        float8: Scaling of 8-bit linear layers and experts, if any.
        float8_skip: Parts of names of those that stay in the compute dtype.
        lora: Adapters, if any.
    """

    mesh: Mesh
    micro_batch_precision: str = "float32"
    sequence_parallel: bool = True
    context: ContextMethod = "auto"
    stages_per_rank: int = 1
    is_v_shaped: bool = False
    reshard_after_forward: bool = True
    recompute: Recompute = "none"
    offload_activations: bool = False
    cpu_offload: bool = False
    compile: bool = False
    float8: Float8 = "none"
    float8_skip: tuple[str, ...] = ("lm_head",)
    lora: Lora | None = None
