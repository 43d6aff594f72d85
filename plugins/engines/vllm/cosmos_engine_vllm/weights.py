"""The weights of a vLLM, in as many processes as it has: where they are, how an update reaches them, what they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from cosmos_core.errors import AttestationError, WeightSyncError
from cosmos_core.protocols import EngineContext, TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.shards import dtype_name
from cosmos_engine_vllm.extension import Facts
from cosmos_engine_vllm.held import meta_tensors
from cosmos_engine_vllm.shares import SharedUpdate, Shares
from cosmos_engine_vllm.workers import Workers

_PART_BYTES: Final = 1 << 30
_MOST_PARTS: Final = 16
"""Of first weights that are larger."""


class Weights:
    """The weights that the workers of one vLLM hold."""

    def __init__(
        self,
        workers: Workers,
        owner: str,
        context: EngineContext,
        *,
        tensors: Mapping[str, torch.Tensor],
        published: Mapping[str, torch.Tensor],
    ) -> None:
        """Let the workers find where tensors are.

        Args:
            workers: The workers.
            owner: The class of vLLM's model, for errors.
            context: Of the engine.
            tensors: Every canonical tensor; only their shapes and dtypes count.
            published: What is sent of them: matrices as codes and scales if they are quantised.

        Raises:
            EngineError: A tensor is held in a form of vLLM's own, or it holds what is none of these.
        """
        self._workers: Final = workers
        self._is_staged: Final = context.tensor_parallel > 1
        sent = _facts(published)
        found = workers.call(
            "cosmos_find", _facts(tensors), sent, context.quantization, dict(context.model.facts().matrices)
        )
        self._shares: Final = Shares(meta_tensors(sent), found, owner)
        workers.call("cosmos_attest_by", self._shares.rank_shards())

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that are sent, on the meta device."""
        return self._shares.tensors

    def layout(self) -> Mapping[int, Sequence[tuple[TensorSlice, str]]]:
        """The slices of each rank, with the names of their dtypes."""
        return self._shares.layout()

    def update(self, version: int) -> SharedUpdate:
        """An update, to be written to each rank."""
        return SharedUpdate(version, self._shares, is_staged=self._is_staged)

    def load(self, update: SharedUpdate) -> None:
        """Let each rank copy what was written to it, once all of them have found it.

        Raises:
            WeightSyncError: A rank cannot read its slices; none has copied any.
            AttestationError: A rank could not copy all of its slices, and others may have: no version is loaded.
        """
        try:
            self._workers.call("cosmos_read", update.sent())
        except WeightSyncError:
            self._workers.call("cosmos_forget_sent")
            raise
        try:
            self._workers.call("cosmos_load")
        except WeightSyncError as error:
            raise AttestationError(
                f"vLLM holds parts of version {update.version} beside what was loaded before: {error}"
            ) from error

    def digest(self) -> str:
        """The digest of what all ranks hold, read back.

        Raises:
            AttestationError: What a rank holds or computes with is not what was written, or ranks differ.
        """
        return self._shares.combine(self._workers.call("cosmos_digests"))

    def load_first(self, published: Mapping[str, torch.Tensor]) -> None:
        """Load what the model was built with.

        Raises:
            EngineError: vLLM does not hold what was written to it.
        """
        digests: list[Mapping[str, Sequence[int]]] = []
        for pieces, num_bytes in self._first_parts():
            update = SharedUpdate(0, self._shares, is_staged=self._is_staged, size_bytes=num_bytes)
            with contextlib.closing(update):
                for rank, piece in pieces:
                    whole = slices.whole(piece.name, tuple(published[piece.name].shape))
                    update.write_to(rank, piece, published[piece.name][slices.within(piece, whole)])
                self.load(update)
                digests = self._workers.call("cosmos_digests")
        self._shares.combine(digests)

    def _first_parts(self) -> Iterator[tuple[Sequence[tuple[int, TensorSlice]], int]]:
        """All slices of all ranks in parts, and bytes of each: one at a time is copied for ranks of other processes."""
        tensors, part, num_bytes = self._shares.tensors, list[tuple[int, TensorSlice]](), 0
        pieces = [(rank, piece) for rank, held in self.layout().items() for piece, _ in held]
        sizes = [slices.size(piece) * tensors[piece.name].element_size() for _, piece in pieces]
        # Each load takes some time that grows with the whole model.
        most = max(_PART_BYTES, sum(sizes) // _MOST_PARTS) if self._is_staged else sum(sizes)
        for each, size in zip(pieces, sizes, strict=True):
            if part and num_bytes + size > most:
                yield part, num_bytes
                part, num_bytes = [], 0
            part.append(each)
            num_bytes += size
        yield part, num_bytes


def _facts(tensors: Mapping[str, torch.Tensor]) -> Facts:
    return {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}
