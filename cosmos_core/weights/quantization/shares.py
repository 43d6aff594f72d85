"""What one process makes of its share of a matrix, so that all shares together are what one process would have made.

The scale of a block needs the largest element of the whole block. Where the columns of a matrix are spread so that
processes share blocks, or where the format has a scale a matrix, they exchange these maxima and nothing else. The
process that has the first column of a block speaks for its scale, the one with the first element of a matrix for that
of the matrix. A `WeightSyncError` names a matrix that is not finite, has another shape than the model's facts say, or
is split in the middle of a byte of codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols.quantization import MATRIX_SCALE, SCALE, Format
from cosmos_core.weights.quantization.codec import block_maxima, encode, matrix_maxima
from cosmos_core.weights.shards import TensorShard, local_shard


@attrs.frozen(kw_only=True, eq=False)
class MatrixShare:
    """A share of a matrix, [..., rows, columns], about to be quantised.

    Attributes:
        size: Its shape.
        largest: Largest magnitude of each block that it touches, over all processes; None to find it in the share.
        whole: Largest magnitude of each matrix, over all processes; None where the format needs none.
    """

    form: Format
    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    largest: torch.Tensor | None = None
    whole: torch.Tensor | None = None

    def parts(self) -> tuple[TensorShard, ...]:
        """What the share becomes: codes, block scales, and matrix scales where the format has them; some are empty."""
        per_byte, first, last = self.form.per_byte, self.start[-1], self.start[-1] + self.size[-1]
        if first % per_byte or (last % per_byte and last < self.shape[-1]):
            raise WeightSyncError(
                f"{self.name}: a process holds its columns {first} to {last}, but {self.form.name} has two columns in "
                "a byte; use a policy.mesh.tp that splits them evenly, or another rollout.quantization"
            )
        row_start, row_size = self.start[:-1], self.size[:-1]
        blocks = self._own_blocks()
        places = {
            self.name: ((*row_start, first // per_byte), (*row_size, -(-last // per_byte) - first // per_byte)),
            f"{self.name}{SCALE}": ((*row_start, blocks.start), (*row_size, len(blocks))),
            f"{self.name}{MATRIX_SCALE}": ((*self.start[:-2], 0, 0), (*self.size[:-2], *self._own_corner())),
        }
        return tuple(
            TensorShard(name=name, dtype=dtype, shape=shape, start=places[name][0], size=places[name][1])
            for name, (dtype, shape) in self.form.tensors(self.name, self.shape).items()
        )

    def quantise(self, share: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The content of each of `parts`."""
        block = self._block
        skipped = self.start[-1] % block
        largest = block_maxima(share, block, skipped) if self.largest is None else self.largest
        codes, scales, matrix_scales = encode(
            self.form, self.name, share, largest, self.whole, block=block, first=skipped
        )
        first_block, own = self.start[-1] // block, self._own_blocks()
        found = [
            codes,
            scales[..., own.start - first_block : own.stop - first_block],
        ]
        if matrix_scales is not None:
            rows, columns = self._own_corner()
            found.append(matrix_scales[..., :rows, :columns])
        return tuple(found)

    @property
    def _block(self) -> int:
        return self.form.block_of(self.shape[-1])

    def _own_blocks(self) -> range:
        """Blocks of which the first column is in the share."""
        first, last = self.start[-1], self.start[-1] + self.size[-1]
        return range(-(-first // self._block), -(-last // self._block))

    def _own_corner(self) -> tuple[int, int]:
        is_own = self.start[-2:] == (0, 0) and all(self.size[-2:])
        return (1, 1) if is_own else (0, 0)


def matrix_shares(
    form: Format, tensors: Mapping[str, torch.Tensor], matrices: Mapping[str, tuple[int, ...]]
) -> dict[str, MatrixShare]:
    """This process's shares of those tensors that `matrices` names (with their shapes), ready to be quantised.

    Tensors are `DTensor`s where they are spread. Every process that holds some of a spread tensor calls it, at the same
    place between its other collectives.
    """
    found: dict[str, MatrixShare] = {}
    blocks, wholes = _Maxima(), _Maxima()
    for name, tensor in tensors.items():
        if name not in matrices:
            continue
        if tuple(tensor.shape) != tuple(matrices[name]):
            raise WeightSyncError(f"{name}: of shape {tuple(tensor.shape)}; the model's facts say {matrices[name]}")
        share = local_shard(tensor)
        shape, start = share.shape, share.start
        found[name] = MatrixShare(form=form, name=name, shape=shape, start=start, size=tuple(share.tensor.shape))
        block = form.block_of(shape[-1])
        shared = _groups(tensor, (-1,)) if _shares_blocks(tensor, block) else []
        if not shared and not form.has_matrix_scale:
            continue
        # What is no number is larger than any, so that all who share it refuse it, whatever their maximum makes of it.
        local = block_maxima(share.tensor, block, start[-1] % block).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        if shared:
            grid = local.new_zeros((*local.shape[:-1], -(-shape[-1] // block)))
            grid[..., start[-1] // block :][..., : local.shape[-1]] = local
            blocks.add(name, grid, shared)
        if form.has_matrix_scale:
            wholes.add(name, matrix_maxima(local), _groups(tensor, (-2, -1)))
    for name, grid in blocks.reduced().items():
        share_of = found[name]
        first, last = share_of.start[-1], share_of.start[-1] + share_of.size[-1]
        block = form.block_of(share_of.shape[-1])
        found[name] = attrs.evolve(share_of, largest=grid[..., first // block : -(-last // block)])
    for name, whole in wholes.reduced().items():
        found[name] = attrs.evolve(found[name], whole=whole)
    return found


class _Maxima:
    """Tensors of which processes keep the largest elements, one collective a group."""

    def __init__(self) -> None:
        self._tensors: Final[dict[str, torch.Tensor]] = {}
        self._groups: Final[dict[dist.ProcessGroup, tuple[DeviceMesh, list[str]]]] = {}

    def add(self, name: str, tensor: torch.Tensor, groups: list[tuple[DeviceMesh, int]]) -> None:
        """Reduce a tensor over some dims of its mesh."""
        self._tensors[name] = tensor
        for mesh, dim in groups:
            self._groups.setdefault(mesh.get_group(dim), (mesh, []))[1].append(name)

    def reduced(self) -> dict[str, torch.Tensor]:
        """The tensors, each the largest over its groups."""
        for group, (mesh, names) in self._groups.items():
            flat = torch.cat([self._tensors[name].flatten() for name in names])
            # Weights that are kept in the CPU's memory meet on the device of their processes.
            meeting = flat.to(mesh.device_type)
            dist.all_reduce(meeting, dist.ReduceOp.MAX, group=group)
            parts = torch.split(meeting.to(flat.device), [self._tensors[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                self._tensors[name] = part.view(self._tensors[name].shape)
        return self._tensors


def _groups(tensor: torch.Tensor, dims: tuple[int, ...]) -> list[tuple[DeviceMesh, int]]:
    """Dims of the mesh over which some of the last dims of a tensor are split."""
    if not isinstance(tensor, DTensor):
        return []
    split = [_split_dim(placement) for placement in tensor.placements]
    wanted = {tensor.ndim + dim for dim in dims}
    return [(tensor.device_mesh, mesh_dim) for mesh_dim, dim in enumerate(split) if dim in wanted]


def _shares_blocks(tensor: torch.Tensor, block: int) -> bool:
    """Whether a block may lie on several processes; all of them say the same."""
    over = _groups(tensor, (-1,))
    if not over:
        return False
    assert isinstance(tensor, DTensor)
    if len(over) > 1 or type(tensor.placements[over[0][1]]) is not Shard:
        return True
    mesh, dim = over[0]
    return -(-tensor.shape[-1] // mesh.size(dim)) % block != 0


def _split_dim(placement: object) -> int | None:
    # Strided shards are no subclass of `Shard` in every release of torch, and have the same attribute.
    dim: int | None = getattr(placement, "dim", None)
    return dim
