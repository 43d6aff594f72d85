"""Which source sends which slice to which rank: each element that a rank lacks is sent to it exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.shards import ShardMap

Plan: TypeAlias = Mapping[int, Mapping[int, list[TensorSlice]]]
"""Source index -> target rank -> slices."""


def plan(
    sources: Sequence[ShardMap],
    target: ShardMap,
    *,
    hosts: Sequence[str] = (),
    host: str = "",
    chunk_bytes: int = 4 << 20,
) -> Plan:
    """Cover the target's slices from the sources.

    Args:
        sources: What each source holds, over all its ranks. Several may hold the same.
        target: What each target rank lacks.
        hosts: Host of each source; a source on `host` is preferred to any other. Empty: all are equally near.
        host: Host of the target.
        chunk_bytes: Slices are split to this size; among equally near sources the one with the least to send is
            chosen, so their loads differ by little more.

    Raises:
        WeightSyncError: A tensor that no source holds, or holds with another shape or dtype, or a slice that the
            sources together do not cover; the message names the first, in the order of names.
    """
    check_agreement(sources, target)
    near = [bool(hosts) and hosts[index] == host for index in range(len(sources))]
    holders = _holders(sources)
    loads = [0] * len(sources)
    result: dict[int, dict[int, list[TensorSlice]]] = {}
    for rank, wanted in target.ranks.items():
        for piece in wanted:
            itemsize = target.tensors[piece.name].itemsize
            for chunk in slices.chunks(piece, max(1, chunk_bytes // itemsize)):
                for source, part in _cover(chunk, holders.get(piece.name, []), near, loads):
                    loads[source] += slices.size(part) * itemsize
                    result.setdefault(source, {}).setdefault(rank, []).append(part)
    return result


def check_agreement(sources: Sequence[ShardMap], target: ShardMap) -> None:
    """Check that every tensor of the target is held somewhere, and with its shape and dtype wherever it is.

    Raises:
        WeightSyncError: It is not; the message names the first such tensor.
    """
    for name in sorted(target.tensors):
        wanted = target.tensors[name]
        held = [source.tensors[name] for source in sources if name in source.tensors]
        if not held:
            raise WeightSyncError(f"{name}: the engine wants it, and no policy replica publishes it")
        for facts in held:
            if facts != wanted:
                raise WeightSyncError(
                    f"{name}: published as {facts.dtype} {facts.shape}, the engine holds {wanted.dtype} "
                    f"{wanted.shape}; `model` and `rollout.precision` must be the same on both sides"
                )


def _holders(sources: Sequence[ShardMap]) -> dict[str, list[tuple[int, TensorSlice]]]:
    holders: dict[str, list[tuple[int, TensorSlice]]] = {}
    for index, source in enumerate(sources):
        for held in source.ranks.values():
            for piece in held:
                holders.setdefault(piece.name, []).append((index, piece))
    return holders


def _cover(
    chunk: TensorSlice, holders: Sequence[tuple[int, TensorSlice]], near: Sequence[bool], loads: Sequence[int]
) -> list[tuple[int, TensorSlice]]:
    """Disjoint parts of a chunk, each with its source: nearest first, then the one with the least to send."""
    if not slices.size(chunk):
        return []
    rest, parts = [chunk], []
    for source, held in sorted(holders, key=lambda holder: (not near[holder[0]], loads[holder[0]], holder[0])):
        missing: list[TensorSlice] = []
        for piece in rest:
            common = slices.overlap(piece, held)
            if common is None:
                missing.append(piece)
            else:
                parts.append((source, common))
                missing += slices.subtract(piece, common)
        rest = missing
    if rest:
        raise WeightSyncError(f"{chunk.name}: no policy replica holds the slice {rest[0].shape} at {rest[0].start}")
    return parts
