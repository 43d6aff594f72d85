"""What a model's forwards record, kept with the sequences whose units they computed (`protocols.Recording`).

A unit's record stands beside its entry in the KV cache: written when that is written, copied when a sample starts from
what another holds, replaced when it is computed anew. It lies in the CPU's memory, so that it outlives its slot: a
sequence that ends between an update and its recompute still has all of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cosmos_core.errors import EngineError
from cosmos_core.protocols import Model, Record, Recording
from cosmos_core.rollout.embedded.scheduler import Plan
from cosmos_core.rollout.serving.sequence import Sequence
from cosmos_core.weights.shards import dtype_name


class Recorder:
    """Keeps the records of one module's forwards."""

    def __init__(self, model: Recording, module: torch.nn.Module) -> None:
        self._records = tuple(model.records())
        self._newest = model.record(module)

    @staticmethod
    def of(model: Model, module: torch.nn.Module) -> Recorder | None:
        """A recorder; None where the model records nothing."""
        return Recorder(model, module) if isinstance(model, Recording) and model.records() else None

    def keep(self, plan: Plan) -> None:
        """Keep what the newest forward recorded, which was that of `plan`.

        Raises:
            EngineError: The model recorded something else than it said it would.
        """
        newest = self._newest()
        num_units = plan.num_decoding + len(plan.piece_tokens)
        for record in self._records:
            rows = _checked(newest, record, num_units).cpu()
            for row, sequence in enumerate(plan.sequences[: plan.num_decoding]):
                _held(sequence, record.name, rows)[len(sequence.tokens) - 1] = rows[row]
            for piece in plan.pieces:
                held = _held(plan.sequences[piece.slot], record.name, rows)
                held[piece.start : piece.start + piece.last - piece.first] = rows[piece.first : piece.last]
            for fork in plan.forks:
                shared = plan.sequences[fork.source].records[record.name][: fork.num_units]
                for target in fork.targets:
                    _held(plan.sequences[target], record.name, rows)[: fork.num_units] = shared


def _held(sequence: Sequence, name: str, like: torch.Tensor) -> torch.Tensor:
    """The record of a sequence, with room for every unit that it may feed."""
    if name not in sequence.records:
        most = sequence.flight.num_prompt + sequence.flight.request.sampling.max_units - 1
        sequence.records[name] = like.new_empty(most, *like.shape[1:])
    return sequence.records[name]


def _checked(newest: Mapping[str, torch.Tensor], record: Record, num_units: int) -> torch.Tensor:
    rows = newest.get(record.name)
    found = None if rows is None else (dtype_name(rows.dtype), tuple(rows.shape))
    expected = (record.dtype, (num_units, *record.shape))
    if rows is None or found != expected:
        raise EngineError(f"the model recorded {record.name!r} as {found} of a forward; it declared {expected}")
    return rows
