"""Quantises weight matrices to codes and scales, which policy replicas send, and turns these into values again.

The formats are those of `cosmos_core.protocols.quantization`. A `WeightSyncError` names a matrix that is not finite,
has another shape than the model's facts say, or is split in the middle of a byte of codes.

What one process makes of its share of a matrix is such that all shares together are what one process would have made.
The scale of a block needs the largest element of the whole block. Where the columns of a matrix are spread so that
processes share blocks, or where the format has a scale a matrix, they exchange these maxima and nothing else. The
process that has the first column of a block speaks for its scale, the one with the first element of a matrix for that
of the matrix.

Shape legend: R rows (any leading dims), C columns, K blocks of B columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols.quantization import MATRIX_SCALE, SCALE, Format
from cosmos_core.weights.shards import Merge, TensorShard, local_shard, torch_dtype

_E4M3_MAX: Final = 448.0
_E4M3_TINY: Final = torch.finfo(torch.float8_e4m3fn).tiny
_E2M1_MAX: Final = 6.0
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 to 7; bit 3 is the sign."""
_E2M1_UP_TO: Final = (0.25, 1.25, 2.5, 5.0)
"""Midpoints of which the lower neighbour has the even code: a tie stays below."""
_E2M1_FROM: Final = (0.75, 1.75, 3.5)
"""Midpoints of which the upper neighbour has the even code."""
_E8M0_BIAS: Final = 127
_SCRATCH: Final = {"cpu": 1 << 16, "other": 1 << 26}
"""Elements that are worked on at once."""
_TINY: Final = torch.finfo(torch.float32).tiny
_Operation: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def quantise(form: Format, name: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes and scales of a whole matrix [..., rows, columns], floating point, on any device; see `Format.tensors`."""
    return quantise_tensors(form, {name: matrix}, {name: tuple(matrix.shape)})


def quantise_tensors(
    form: Format, tensors: Mapping[str, torch.Tensor], matrices: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Tensors by name, those that are matrices as their codes and scales; the others as they are."""
    found, finite = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if name not in matrices:
            found[name] = tensor
            continue
        largest = block_maxima(tensor.detach(), form.block_of(tensor.shape[-1]))
        whole = matrix_maxima(largest) if form.has_matrix_scale else None
        finite[name] = _is_finite(largest, whole)
        made = encode(form, tensor.detach(), largest, whole)
        names = (name, f"{name}{SCALE}", f"{name}{MATRIX_SCALE}")
        found.update({each: part for each, part in zip(names, made, strict=True) if part is not None})
    if problem := not_finite(finite):
        raise WeightSyncError(problem)
    return found


def not_finite(finite: Mapping[str, torch.Tensor]) -> str:
    """The message of the first matrix, by `finite`, that no codes can hold, or nothing; waits for its device once."""
    if not finite:
        return ""
    found = zip(finite, torch.stack([*finite.values()]).tolist(), strict=True)
    wrong = [name for name, is_finite in found if not is_finite]
    if not wrong:
        return ""
    return (
        f"{wrong[0]}: it has elements that are not finite, which no codes can hold ({len(wrong)} of {len(finite)} "
        "matrices have some); training has diverged, or set rollout.quantization = 'none' to see where"
    )


def _is_finite(largest: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
    """Tell whether a matrix of such maxima is finite: bool [] on its device, which is not waited for."""
    found = largest.isfinite().all()
    return found if whole is None else found & whole.isfinite().all()


def dequantise(form: Format, name: str, tensors: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
    """The matrix of some codes and scales, float32 [..., rows, columns], on their device.

    They are by name, among others; all of the matrix, or the same rows of codes and scales.
    """
    codes = tensors[name]
    values = unpack(codes)[..., :columns] if form.per_byte > 1 else _from_e4m3(codes)
    scales = tensors[f"{name}{SCALE}"].float()
    if form.has_matrix_scale:
        scales = scales * tensors[f"{name}{MATRIX_SCALE}"]
    return _by_block(torch.mul, values, scales, form.block_of(columns), 0)


def dequantised_rows(
    form: Format, name: str, tensors: Mapping[str, torch.Tensor], columns: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """`dequantise` in steps of bounded memory: indices of the first dim, and float32 values there."""
    held = {each: tensors[each] for each in (name, f"{name}{SCALE}", f"{name}{MATRIX_SCALE}") if each in tensors}
    num = len(tensors[name])
    for rows in _steps(tensors[name].reshape(num, -1)) if tensors[name].numel() else ():
        # The scale of one matrix is for all of its rows.
        part = {each: tensor[rows] if len(tensor) == num else tensor for each, tensor in held.items()}
        yield rows, dequantise(form, name, part, columns)


def dequantise_blocks(
    codes: torch.Tensor, scales: torch.Tensor, size: int, first: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The values of e4m3 codes [..., rows, columns] with a scale for each block of `size` rows and columns.

    `first` rows and columns of the first block come before these. Products are float32, rounded to `dtype` once.
    """
    *_, num_rows, columns = codes.shape
    blocks = (torch.arange(num_rows) + first[0]) // size
    scales_RK = scales.float().index_select(-2, blocks).reshape(-1, scales.shape[-1])
    codes_RC = codes.reshape(-1, columns)
    found_RC = torch.empty(codes_RC.shape, dtype=dtype)
    for rows in _steps(codes_RC):
        found_RC[rows] = _by_block(torch.mul, _from_e4m3(codes_RC[rows]), scales_RK[rows], size, first[1])
    return found_RC.view(codes.shape)


def copy_exactly(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy; codes and scales of a byte as bytes, as not every device copies each of their dtypes."""
    if target.dtype == source.dtype and target.element_size() == 1:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source, non_blocking=non_blocking)


def block_maxima(matrix: torch.Tensor, block: int, first: int = 0) -> torch.Tensor:
    """The largest magnitude of each block of some columns of a matrix, float32 [..., rows, blocks].

    `first` columns of the first block come before these.
    """
    *leading, columns = matrix.shape
    num = -(-(first + columns) // block)
    if not matrix.numel():
        return matrix.new_zeros((*leading, num), dtype=torch.float32)
    rows_RC = matrix.reshape(-1, columns)
    found_RK = matrix.new_empty((len(rows_RC), num), dtype=torch.float32)
    for rows in _steps(rows_RC):
        found_RK[rows] = _blocks(rows_RC[rows], first, num, block).abs().amax(-1)
    return found_RK.view(*leading, num)


def matrix_maxima(largest: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each matrix, [..., 1, 1], of those of its blocks."""
    if not largest.numel():
        return largest.new_zeros((*largest.shape[:-2], 1, 1))
    return largest.amax((-2, -1), keepdim=True)


def encode(
    form: Format,
    matrix: torch.Tensor,
    largest: torch.Tensor,
    whole: torch.Tensor | None,
    *,
    block: int | None = None,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, block scales and matrix scales of some columns of a matrix, which begin and end with bytes of codes.

    Args:
        form: The format.
        matrix: The columns, floating point.
        largest: Of each block that these columns touch, the largest magnitude, float32 [..., rows, blocks].
        whole: Of each whole matrix, the largest magnitude, float32 [..., 1, 1]; None where the format needs none.
        block: Columns of a block; follows from the columns if they are all of the matrix.
        first: Columns of the first block that come before these.
    """
    scales, factors, matrix_scales = _scales(form, largest, whole)
    *leading, columns = matrix.shape
    block = form.block_of(columns) if block is None else block
    # A block of zeros may have the scale 0, and stays zeros.
    divisors = torch.where(factors > 0, factors, torch.ones_like(factors))
    num_bytes = -(-columns // form.per_byte)
    codes = torch.empty((*leading, num_bytes), dtype=torch_dtype(form.codes), device=matrix.device)
    if matrix.numel():
        rows_RC, codes_RC = matrix.reshape(-1, columns), codes.view(-1, num_bytes)
        divisors_RK = divisors.reshape(len(rows_RC), -1)
        for rows in _steps(rows_RC):
            values = _by_block(torch.div, rows_RC[rows].float(), divisors_RK[rows], block, first)
            codes_RC[rows] = pack(_to_e2m1(values)) if form.per_byte > 1 else _to_e4m3(values)
    return codes, scales, matrix_scales


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes a byte along the last dim, uint8; an odd last one shares its byte with a zero."""
    if codes.shape[-1] % 2:
        codes = pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """float32 values of packed 4-bit codes; those of an odd number of columns have one too many."""
    pairs = _pairs(packed.device).index_select(0, packed.flatten().int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.lru_cache(maxsize=64)
def _pairs(device: torch.device) -> torch.Tensor:
    """The bits of the two float32 values of each byte of codes, int64 [256]."""
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
    codes = torch.arange(256)
    return torch.stack((values[codes & 0xF], values[codes >> 4]), -1).view(torch.int64).flatten().to(device)


def _from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    # A table is read some ten times as fast as torch 2.13 converts on a CPU.
    return _bytes(codes.device).index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


@functools.lru_cache(maxsize=64)
def _bytes(device: torch.device) -> torch.Tensor:
    """The value of each e4m3 code, float32 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def _scales(
    form: Format, largest: torch.Tensor, whole: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Block scales as they are held, what elements are divided by, and matrix scales."""
    if whole is not None:
        matrix_scales = (whole / (_E4M3_MAX * _E2M1_MAX)).clamp_min(_TINY)
        # With a scale that is rounded to 0, the block would be lost.
        scales = _to_e4m3((largest / _E2M1_MAX / matrix_scales).clamp_min(_E4M3_TINY).where(largest > 0, 0.0))
        return scales, scales.float() * matrix_scales, matrix_scales
    if form.scale == "float32":
        scales = (largest / _E4M3_MAX).clamp_min(_TINY)
        return scales, scales, None
    largest_exponent = 2 if form.per_byte > 1 else 8
    # frexp's mantissa is in [0.5, 1), so its exponent is floor(log2) + 1; of 0 it is 0.
    exponents = torch.frexp(largest).exponent - 1 - largest_exponent
    exponents = exponents.masked_fill(largest == 0, -_E8M0_BIAS).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    scales = (exponents + _E8M0_BIAS).to(torch.uint8).view(torch_dtype(form.scale))
    return scales, scales.float(), None


def _to_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round to e2m1: a 4-bit code for each element, uint8."""
    magnitudes = values.abs()
    codes = torch.signbit(values).to(torch.uint8) << 3
    for midpoint in _E2M1_UP_TO:
        codes += magnitudes > midpoint
    for midpoint in _E2M1_FROM:
        codes += magnitudes >= midpoint
    return codes


def _by_block(
    operation: _Operation, values: torch.Tensor, scales: torch.Tensor, block: int, first: int
) -> torch.Tensor:
    """Each block times, or divided by, its scale; `first` columns of the first block come before these."""
    columns, num = values.shape[-1], scales.shape[-1]
    if num == 1 or not values.numel():
        return operation(values, scales[..., :1])
    blocks = _blocks(values, first, num, block)
    return operation(blocks, scales[..., None]).flatten(-2)[..., first : first + columns]


def _steps(rows_RC: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows, on a CPU few enough that its caches hold the intermediate results."""
    num, columns = rows_RC.shape
    step = max(1, _SCRATCH["cpu" if rows_RC.device.type == "cpu" else "other"] // columns)
    yield from (slice(first, first + step) for first in range(0, num, step))


def _blocks(values: torch.Tensor, before: int, num: int, block: int) -> torch.Tensor:
    """The columns as [..., blocks, columns of a block], so many zeros before them and what is lacking after them."""
    after = num * block - before - values.shape[-1]
    padded = pad(values, (before, after)) if before or after else values
    return padded.reshape(*values.shape[:-1], num, block)


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
        """The shards of the quantised share: codes, block scales, and matrix scales if any; some are empty."""
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
        """The content of each of `parts`, and whether the share is finite (bool []), all on its device."""
        block = self._block
        skipped = self.start[-1] % block
        largest = block_maxima(share, block, skipped) if self.largest is None else self.largest
        codes, scales, matrix_scales = encode(self.form, share, largest, self.whole, block=block, first=skipped)
        first_block, own = self.start[-1] // block, self._own_blocks()
        found = [codes, scales[..., own.start - first_block : own.stop - first_block]]
        if matrix_scales is not None:
            rows, columns = self._own_corner()
            found.append(matrix_scales[..., :rows, :columns])
        return (*found, _is_finite(largest, self.whole))

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
    form: Format,
    tensors: Mapping[str, torch.Tensor],
    matrices: Mapping[str, tuple[int, ...]],
    merges: Mapping[str, Merge] = MappingProxyType({}),
) -> dict[str, MatrixShare]:
    """This process's shares of those tensors that `matrices` names (with their shapes), ready to be quantised.

    Tensors are `DTensor`s where they are spread; `merges` change some before they are quantised. Every process that
    holds some of a spread tensor calls it, at the same place between its other collectives.
    """
    found: dict[str, MatrixShare] = {}
    blocks, wholes = _Maxima(), _Maxima()
    for name, tensor in tensors.items():
        if name not in matrices:
            continue
        if tuple(tensor.shape) != tuple(matrices[name]):
            raise WeightSyncError(f"{name}: of shape {tuple(tensor.shape)}; the model's facts say {matrices[name]}")
        share = local_shard(tensor, merges.get(name))
        shape, start = share.shape, share.start
        found[name] = MatrixShare(form=form, name=name, shape=shape, start=start, size=tuple(share.tensor.shape))
        block = form.block_of(shape[-1])
        shared = _groups(tensor, (-1,)) if _shares_blocks(tensor, block) else []
        if not shared and not form.has_matrix_scale:
            continue
        # What is no number is larger than any, so that all who share it refuse it, whatever their maximum makes of it.
        local = block_maxima(share.sent(), block, start[-1] % block).nan_to_num_(nan=torch.inf, posinf=torch.inf)
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
        """The tensors, each reduced to the largest elements over its groups."""
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
    # Strided shards are no subclass of `Shard` in every release of torch, and have the same attribute.
    split = [getattr(placement, "dim", None) for placement in tensor.placements]
    wanted = {tensor.ndim + dim for dim in dims}
    return [(tensor.device_mesh, mesh_dim) for mesh_dim, dim in enumerate(split) if dim in wanted]


def _shares_blocks(tensor: torch.Tensor, block: int) -> bool:
    """True if a block may lie on several processes; all of them say the same."""
    over = _groups(tensor, (-1,))
    if not over:
        return False
    assert isinstance(tensor, DTensor)
    if len(over) > 1 or type(tensor.placements[over[0][1]]) is not Shard:
        return True
    mesh, dim = over[0]
    return -(-tensor.shape[-1] // mesh.size(dim)) % block != 0
