"""Attestation of weights: one digest, however the tensors are split, ordered or laid out.

The digest of a tensor is a sum over its elements, so that ranks which hold disjoint slices add theirs:

    digest = a(name) · Σ_rc R(r) · C(c) · v(r, c) + b(name) · number of elements   (mod 2^64)

v is the element's bit pattern as an integer of at most 32 bits (8-byte types count as two), (r, c) its place in the
whole tensor with the dims split in two halves, R and C are odd keys of splitmix64, a (odd) and b come from a hash of
name, dtype and shape. Odd keys are units mod 2^64: one changed element always changes the digest; other faults
(swapped, shifted, zeroed, missing or repeated pieces) escape with a probability of about 2^-32 or less. It guards
against faults, not against forgery.

Source: multilinear hashing, Lemire and Kaser, arXiv 1202.4961, section 3, with keys that are products of two tables.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import torch

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.shards import EngineLayout, ShardMap

WEYL: Final = 0x9E3779B97F4A7C15
"""What the generator's state grows by."""

MODULUS: Final = 1 << 64
_FACTORS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def signed(value: int) -> int:
    """The int64 with the bits of a number below 2^64."""
    return value - MODULUS if value >= 1 << 63 else value


def mix(value: int) -> int:
    """The output of splitmix64 for a state, below 2^64; only the lowest 64 bits of the state count."""
    value %= MODULUS
    for shift, factor in _FACTORS:
        value = ((value ^ (value >> shift)) * factor) % MODULUS
    return value ^ (value >> 31)


def mix_all(states: torch.Tensor) -> torch.Tensor:
    """The output of splitmix64 for each state; states and outputs are int64."""
    mixed = states
    for shift, factor in _SIGNED_FACTORS:
        mixed = _xor_shift(mixed, shift).mul_(factor)
    return _xor_shift(mixed, 31)


def _xor_shift(value: torch.Tensor, shift: int) -> torch.Tensor:
    """`value ^ (value >>> shift)`: torch shifts arithmetically, so the sign's copies are masked off."""
    return (value >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(value)


_SIGNED_FACTORS: Final = tuple((shift, signed(factor)) for shift, factor in _FACTORS)


_ROW_STREAM: Final = 0x5851F42D4C957F2D
_COLUMN_STREAM: Final = 0x14057B7EF767814F
_TABLE: Final = 1 << 16
"""Keys kept per device; longer dims compute theirs block by block."""

_BLOCK: Final = {"cpu": 1 << 16, "other": 1 << 24}
"""Elements per pass: on a CPU the int64 scratch (512 KiB) stays in the second-level cache."""

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digests:
    """Adds up the digests of slices, by name, on the devices that they lie on; to ask for them waits for these."""

    def __init__(self) -> None:
        self._known: Final[dict[str, int]] = {}
        self._sums: Final[dict[torch.device, list[tuple[str, int, torch.Tensor]]]] = {}

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        start: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        """Add a tensor, or its share of a larger one; see `tensor_digest`."""
        whole = tuple(tensor.shape) if shape is None else tuple(shape)
        begin = (0,) * len(whole) if start is None else tuple(start)
        size = tuple(tensor.shape)
        fits = len(begin) == len(size) == len(whole)
        if not fits or any(s < 0 or s + n > w for s, n, w in zip(begin, size, whole, strict=True)):
            raise ValueError(f"{name}: a slice of shape {size} at {begin} does not lie in a tensor of shape {whole}")
        odd, per_element = _name_keys(name, str(tensor.dtype), whole)
        self._known[name] = (self._known.get(name, 0) + per_element * tensor.numel()) % MODULUS
        if tensor.numel():
            weighted = _weighted_sum(tensor.detach(), begin, whole)
            self._sums.setdefault(tensor.device, []).append((name, odd, weighted))

    def found(self) -> dict[str, int]:
        """The sums so far, each below 2^64."""
        total = dict(self._known)
        for sums in self._sums.values():
            values = torch.stack([weighted for *_, weighted in sums]).tolist()
            for (name, odd, _), value in zip(sums, values, strict=True):
                total[name] = (total[name] + odd * value) % MODULUS
        return total


def tensor_digest(
    name: str, tensor: torch.Tensor, *, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
) -> int:
    """Digest a tensor, or its share of a larger one.

    Args:
        name: Canonical name.
        tensor: The values, any dtype of up to 8 bytes an element, any strides, any device.
        start: Where the tensor begins in the whole one; the origin if absent.
        shape: Shape of the whole tensor; `tensor`'s own if absent.

    Returns:
        A number below 2^64. Disjoint slices that cover the tensor add up to its digest mod 2^64.

    Raises:
        ValueError: The slice does not lie within `shape`.
    """
    digests = Digests()
    digests.add(name, tensor, start=start, shape=shape)
    return digests.found()[name]


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The digest of each of a set of whole tensors, by name."""
    digests = Digests()
    for name, tensor in tensors.items():
        digests.add(name, tensor)
    return digests.found()


def add_digests(partials: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add what several ranks or slices contribute, by name."""
    total: dict[str, int] = {}
    for partial in partials:
        for name, value in partial.items():
            total[name] = (total.get(name, 0) + value) % MODULUS
    return total


def combine(digests: Mapping[str, int]) -> str:
    """One hex digest of a model from the digests of all its tensors, whatever their order."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(digests):
        if not 0 <= digests[name] < MODULUS:
            raise ValueError(f"{name}: {digests[name]} is no digest, which is a number from 0 up to 2^64")
        encoded = name.encode()
        state.update(len(encoded).to_bytes(4, "little") + encoded + digests[name].to_bytes(8, "little"))
    return state.hexdigest()


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The hex digest of a set of whole tensors, whatever their order."""
    return combine(tensor_digests(tensors))


@functools.lru_cache(maxsize=1 << 16)
def _name_keys(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{name}\0{dtype}\0{shape}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") | 1, int.from_bytes(digest[8:], "little")


def _weighted_sum(tensor: torch.Tensor, start: tuple[int, ...], whole: tuple[int, ...]) -> torch.Tensor:
    """Σ R(r) · C(c) · v(r, c) of a slice, mod 2^64: an int64 on its device."""
    # Where both halves have few places, hence few keys.
    split = min(range(len(whole) + 1), key=lambda dim: math.prod(whole[:dim]) + math.prod(whole[dim:]))
    device = tensor.device
    rows = _places(start[:split], tensor.shape[:split], whole[:split], device)
    columns = _places(start[split:], tensor.shape[split:], whole[split:], device)
    # As bits first: not every device copies each dtype of a byte.
    values = tensor.view(BITS[tensor.element_size()]).reshape(len(rows), len(columns))
    if not values.is_contiguous() and values.stride(-1) != 1:
        values = values.contiguous()
    if tensor.element_size() == 8:
        values, columns = values.view(torch.int32), _doubled(columns, device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for row, column, block in _blocks(values):
        row_keys = _keys(_ROW_STREAM, rows, row, block.shape[0], device)
        column_keys = _keys(_COLUMN_STREAM, columns, column, block.shape[1], device)
        total += block.to(torch.int64).mul_(column_keys).sum(1).mul_(row_keys).sum()
    return total


def _places(
    start: Sequence[int], size: Sequence[int], whole: Sequence[int], device: torch.device
) -> range | torch.Tensor:
    """Flat places, in the whole of some dims, of a slice of them: a range where they are contiguous."""
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    first = sum(s * stride for s, stride in zip(start, strides, strict=True))
    wide = next((dim for dim, count in enumerate(size) if count > 1), len(size))
    if all(count == full for count, full in zip(size[wide + 1 :], whole[wide + 1 :], strict=True)):
        return range(first, first + math.prod(size))
    places = torch.full((1,), first, dtype=torch.int64, device=device)
    for count, stride in zip(size, strides, strict=True):
        offsets = torch.arange(count, dtype=torch.int64, device=device) * stride
        places = (places[:, None] + offsets).flatten()
    return places


def _doubled(places: range | torch.Tensor, device: torch.device) -> range | torch.Tensor:
    """Places of the two 4-byte halves of each 8-byte element."""
    if isinstance(places, range):
        return range(2 * places.start, 2 * places.stop)
    return (places[:, None] * 2 + torch.arange(2, device=device)).flatten()


def _blocks(values: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first row, first column, block) of a matrix, each block small enough for the scratch."""
    limit = _BLOCK["cpu" if values.device.type == "cpu" else "other"]
    num_rows, num_columns = values.shape
    width = min(num_columns, limit)
    height = max(1, limit // width)
    for row in range(0, num_rows, height):
        for column in range(0, num_columns, width):
            yield row, column, values[row : row + height, column : column + width]


def _keys(stream: int, places: range | torch.Tensor, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd int64 keys of `count` places from index `first` of `places` on."""
    chosen = places[first : first + count]
    if isinstance(chosen, range):
        if chosen.stop <= _TABLE:
            return _table(stream, device)[chosen.start : chosen.stop]
        chosen = torch.arange(chosen.start, chosen.stop, dtype=torch.int64, device=device)
    return _splitmix(chosen, stream)


@functools.lru_cache(maxsize=64)
def _table(stream: int, device: torch.device) -> torch.Tensor:
    # There once this returns, whichever of a device's streams asks for it next.
    return _splitmix(torch.arange(_TABLE, dtype=torch.int64), stream).to(device)


def _splitmix(index: torch.Tensor, stream: int) -> torch.Tensor:
    """Odd keys: splitmix64 of a stream at some indices."""
    return mix_all(index * signed(WEYL) + signed(stream)) | 1


_Shards: TypeAlias = tuple[TensorSlice, ...]


class Arrivals:
    """Adds up, for each rank, the digests of the slices that come for it.

    A tensor is checked by every choice of ranks that need each other to make it up: copies must be equal, and parts add
    up to what was published.
    """

    def __init__(self, published: Mapping[str, int], layout: EngineLayout) -> None:
        """Begin with nothing; `layout` is to arrive (`RolloutEngine.layout`), with the digests published."""
        self._published: Final = published
        self._tensors: Final = ShardMap.of_layout(layout).tensors
        self._shards: Final[dict[str, dict[int, _Shards]]] = {name: {} for name in self._tensors}
        for rank, held in layout.items():
            # As the sources send: what a rank names twice comes once.
            for piece in slices.disjoint([piece for piece, _ in held]):
                shards = self._shards[piece.name]
                shards[rank] = (*shards.get(rank, ()), piece)
        self._parts: Final[dict[tuple[int, str], tuple[int, int]]] = {}
        """What a rank got of a tensor: the sum of its digests, and how many elements."""

    def add(self, rank: int, piece: TensorSlice, data: torch.Tensor) -> None:
        """Take a slice that came for a rank."""
        digest, count = self._parts.get((rank, piece.name), (0, 0))
        digest += tensor_digest(piece.name, data, start=piece.start, shape=self._tensors[piece.name].shape)
        self._parts[rank, piece.name] = digest % MODULUS, count + slices.size(piece)

    def first_wrong(self) -> str | None:
        """The first tensor, by name, that did not arrive as it was published; None if none is known to be wrong."""
        return next((name for name in sorted(self._tensors) if self._is_right(name) is False), None)

    def unchecked(self) -> list[str]:
        """Tensors, by name, of which something could not be compared with what was published.

        It did not arrive whole, or no other ranks hold just the rest of what a rank holds.
        """
        return [name for name in sorted(self._tensors) if self._is_right(name) is None]

    def _is_right(self, name: str) -> bool | None:
        """True if a tensor arrived at every rank as published, False if not, None if part of it was not checked."""
        digests: dict[_Shards, set[int]] = {}
        is_known = True
        for rank, shards in self._shards[name].items():
            digest, count = self._parts.get((rank, name), (0, 0))
            if count == _size(shards):
                place = tuple(sorted(shards, key=lambda piece: (piece.start, piece.shape)))
                digests.setdefault(place, set()).add(digest)
            else:
                is_known = False
        if any(len(copies) > 1 for copies in digests.values()):
            return False
        for shards in digests:
            family = _completed(shards, digests, math.prod(self._tensors[name].shape))
            if family is None:
                is_known = False
            elif sum(digest for each in family for digest in digests[each]) % MODULUS != self._published.get(name):
                return False
        return True if is_known else None


def _completed(shards: _Shards, others: Iterable[_Shards], size: int) -> list[_Shards] | None:
    """These shards and those of other ranks that make up a tensor of `size` elements; None if none are found."""
    family = [shards]
    for other in others:
        if not any(slices.overlap(a, b) for each in family for a, b in itertools.product(each, other)):
            family.append(other)
    return family if sum(map(_size, family)) == size else None


def _size(shards: _Shards) -> int:
    return sum(map(slices.size, shards))
