"""The weights that a process of vLLM holds: its shards of each tensor that travels, written in place and read back.

Without a format these lie in vLLM's parameters. With one, a matrix travels as codes and scales, which are held beside
the parameter, and the parameter is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs
import torch

from cosmos_core.errors import AttestationError, EngineError
from cosmos_core.protocols import TensorSlice
from cosmos_core.protocols.quantization import MATRIX_SCALE, SCALE, Format
from cosmos_core.rollout.serving.updates import same_bits
from cosmos_core.weights import slices
from cosmos_core.weights.digest import add_digests, tensor_digest
from cosmos_core.weights.quantization import copy_exactly, dequantised_rows
from cosmos_core.weights.shards import torch_dtype
from cosmos_engine_vllm.regions import Region

Written = Sequence[tuple[TensorSlice, torch.Tensor]]


@attrs.frozen(eq=False)
class Quantised:
    """A region of a matrix, and what it is made of.

    Attributes:
        region: Where its values are.
        tensors: Codes and scales by name, of its rows and of whole blocks of columns.
        first: Columns of these that come before the region's.
        columns: Columns that the codes stand for.
    """

    region: Region
    tensors: Mapping[str, torch.Tensor]
    first: int
    columns: int


class HeldWeights:
    """The shards of one rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        regions: Mapping[str, Sequence[Region]],
        facts: Mapping[str, torch.Tensor],
        *,
        form: Format | None = None,
        matrices: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Make room for codes and scales.

        Args:
            model: Loaded by vLLM.
            regions: Where it keeps this rank's parts of canonical tensors.
            facts: Each tensor that travels, on the meta device.
            form: The format of matrices; None for all as they are.
            matrices: Shape of each matrix.
        """
        self._model: Final = model
        self._regions: Final = regions
        self._facts: Final = facts
        self._form: Final = form
        quantised = {} if form is None else dict(matrices or {})
        self._plain: Final = {name: held for name, held in regions.items() if name not in quantised}
        self._quantised: Final[list[Quantised]] = []
        self._stored: Final[dict[str, list[tuple[TensorSlice, torch.Tensor]]]] = {}
        if form is not None:
            device = next(model.parameters()).device
            for name in quantised:
                for region in regions[name]:
                    self._quantised.append(self._make_room(form, region, quantised[name], device))

    def _make_room(self, form: Format, region: Region, shape: tuple[int, ...], device: torch.device) -> Quantised:
        piece = region.piece
        block = form.block_of(shape[-1])
        first, end = piece.start[-1], piece.start[-1] + piece.shape[-1]
        if form.block is not None:
            first, end = first // block * block, min(-(-end // block) * block, shape[-1])
        columns = end - first
        name, tensors = piece.name, {}
        extents = {
            name: (first // form.per_byte, -(-columns // form.per_byte)),
            f"{name}{SCALE}": (0, 1) if form.block is None else (first // block, -(-columns // block)),
        }
        for each, (start, count) in extents.items():
            shard = TensorSlice(name=each, start=(*piece.start[:-1], start), shape=(*piece.shape[:-1], count))
            tensors[each] = self._store(shard, device)
        if form.has_matrix_scale:
            shard = TensorSlice(
                name=f"{name}{MATRIX_SCALE}", start=(*piece.start[:-2], 0, 0), shape=(*piece.shape[:-2], 1, 1)
            )
            tensors[shard.name] = self._store(shard, device)
        return Quantised(region, tensors, piece.start[-1] - first, columns)

    def _store(self, shard: TensorSlice, device: torch.device) -> torch.Tensor:
        held = self._stored.setdefault(shard.name, [])
        for other, tensor in held:
            if other == shard:
                return tensor
        held.append((shard, torch.zeros(shard.shape, dtype=self._facts[shard.name].dtype, device=device)))
        return held[-1][1]

    def shards(self) -> dict[str, list[TensorSlice]]:
        """The slices that this rank holds, by name of the tensor that travels."""
        plain = {name: [region.piece for region in held] for name, held in self._plain.items()}
        return {**plain, **{name: [shard for shard, _ in held] for name, held in self._stored.items()}}

    def copy(self, pieces: Written) -> None:
        """Write slices, and make parameters of codes and scales."""
        live = self._live()
        for piece, data in pieces:
            for shard, view in live[piece.name]:
                part = slices.overlap(piece, shard)
                if part is not None:
                    copy_exactly(view[slices.within(part, shard)], data[slices.within(part, piece)].to(view.device))
        if self._form is not None:
            parameters = self._parameters()
            for each in self._quantised:
                view = each.region.view(parameters)
                for rows, values in self._dequantised(self._form, each):
                    view[rows].copy_(values)

    def check(self, pieces: Written, rank: int) -> None:
        """Compare what is held with what was written, bit by bit.

        Raises:
            AttestationError: Names the tensor that differs.
        """
        live = self._live()
        for piece, data in pieces:
            for shard, view in live[piece.name]:
                part = slices.overlap(piece, shard)
                if part is not None:
                    found, sent = view[slices.within(part, shard)], data[slices.within(part, piece)]
                    # vLLM may hold a bias in more bits than it was given: what was given comes back exactly.
                    if not same_bits(found.to(sent.dtype), sent.to(view.device)):
                        raise AttestationError(
                            f"{piece.name}: vLLM's rank {rank} does not hold, of the slice of {part.shape} at "
                            f"{part.start}, what was written there"
                        )
        if self._form is not None:
            parameters = self._parameters()
            for each in self._quantised:
                self._check_made(self._form, each, each.region.view(parameters), rank)

    def _check_made(self, form: Format, each: Quantised, view: torch.Tensor, rank: int) -> None:
        for rows, values in self._dequantised(form, each):
            if not same_bits(view[rows], values.to(view.dtype)):
                raise AttestationError(
                    f"{each.region.piece.name}: the parameter {each.region.parameter} of vLLM's rank {rank} is not "
                    f"what its {form.name} codes and scales stand for"
                )

    @staticmethod
    def _dequantised(form: Format, each: Quantised) -> Iterable[tuple[slice, torch.Tensor]]:
        end = each.first + each.region.piece.shape[-1]
        for rows, values in dequantised_rows(form, each.region.piece.name, each.tensors, each.columns):
            yield rows, values[..., each.first : end]

    def digests(self, rank_shards: Mapping[str, Sequence[TensorSlice]]) -> dict[str, list[int]]:
        """The digest of each of these slices, all of which this rank holds, in one shard or several, read back."""
        live = self._live()
        return {name: [self._digest(part, live[name]) for part in each] for name, each in rank_shards.items()}

    def _digest(self, wanted: TensorSlice, held: Sequence[tuple[TensorSlice, torch.Tensor]]) -> int:
        meta = self._facts[wanted.name]
        found, missing = 0, [wanted]
        for shard, view in held:
            # Shards may hold the same values twice: each is counted once.
            parts = [part for each in missing if (part := slices.overlap(each, shard)) is not None]
            for part in parts:
                values = view[slices.within(part, shard)].to(meta.dtype)
                digest = tensor_digest(wanted.name, values, start=part.start, shape=tuple(meta.shape))
                found = add_digests([{wanted.name: found}, {wanted.name: digest}])[wanted.name]
            missing = [rest for each in missing for rest in slices.without(each, shard)]
        if missing:
            raise EngineError(f"{wanted.name}: this rank of vLLM holds no slice of {wanted.shape} at {wanted.start}")
        return found

    def owner_of(self, parameter: torch.Tensor, row: int) -> str:
        """The canonical tensor in a row of a parameter; empty for a row that pads."""
        place, parameters = row * parameter.stride(0), self._parameters()
        for name, held in self._regions.items():
            for region in held:
                if parameters[region.parameter].data_ptr() != parameter.data_ptr():
                    continue
                first = region.offset - int(parameter.storage_offset())
                if first <= place < first + region.piece.shape[0] * region.stride[0]:
                    return name
        return ""

    def _parameters(self) -> dict[str, torch.Tensor]:
        # Looked up once an update: there are many slices.
        return dict(self._model.named_parameters())

    def _live(self) -> dict[str, list[tuple[TensorSlice, torch.Tensor]]]:
        parameters = self._parameters()
        plain = {
            name: [(region.piece, region.view(parameters)) for region in held] for name, held in self._plain.items()
        }
        return {**plain, **self._stored}


def meta_tensors(facts: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, torch.Tensor]:
    """Tensors that hold nothing, of shapes and names of dtypes."""
    return {name: torch.empty(shape, dtype=torch_dtype(dtype), device="meta") for name, (shape, dtype) in facts.items()}
