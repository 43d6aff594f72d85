"""Tests of micro-batches: each payload once, within the budget, the same each time, and padded to no effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import attrs
import pytest
import torch

from cosmos_core.models.tokens import KIND, values
from cosmos_core.policy.training.microbatch import Piece, pieces
from cosmos_core.protocols import MicroBatch
from cosmos_core.testing.conformance.model.subject import ROOM, Subject, attempt, expect_close, split
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_MULTIPLE: Final = 7
"""One that no size of a test happens to be a multiple of."""


class PackingTests:
    """Tests of `pack`."""

    def test_each_payload_is_packed_once_within_the_budget(self, subject: Subject) -> None:
        """What is lost is never learnt from; the budget is what fits into memory; averages are made of the counts."""
        for budget in subject.budgets:
            batches = subject.model.pack(subject.payloads, budget=budget)
            _check_pieces(batches, budget)
            # Of a sequence that is split, its first piece counts.
            counts = Counter(piece.sequence for batch in batches for piece in pieces(batch) if piece.span.first == 0)
            wrong = sorted(i for i in {*counts, *range(len(subject.payloads))} if counts[i] != 1)
            if wrong:
                seen = ", ".join(f"number {index} {counts[index]} times" for index in wrong)
                fault(f"pack() under a budget of {budget} units packed {seen}, not once")
            if (largest := max(batch.num_units for batch in batches)) > budget:
                fault(f"pack() made a micro-batch of {largest} units under a budget of {budget}")
            for batch in batches:
                _check_counts(subject, batch)
        longest = max(subject.alone, key=lambda batch: batch.num_units)
        payload, size = subject.payloads[subject.alone.index(longest)], longest.num_units
        found = attempt(subject.model.pack, [payload], budget=size - 1)
        if found is not None and (len(found) < 2 or any(batch.num_units >= size for batch in found)):
            fault(
                f"pack() took a payload of {size} units under a budget of {size - 1}; raise DataError that names the "
                "payload and policy.micro_batch_units, or split it (`MicroBatch.spans`)"
            )

    def test_packing_depends_on_the_payloads_alone(self, subject: Subject) -> None:
        """A resumed run and every replica pack the same, of read-only frames of a network, on any machine."""
        received, model = [_received(payload) for payload in subject.payloads], subject.model
        for budget in subject.budgets:
            expected = model.pack(subject.payloads, budget=budget)
            for name, tensor in (item for batch in expected for item in batch.inputs.items()):
                if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                    fault(f"MicroBatch.inputs[{name!r}] is {type(tensor).__name__}; give a torch.Tensor on the CPU")
            for what, packer, payloads in (
                ("a second time", model, subject.payloads),
                ("by another instance", subject.make(), subject.payloads),
                ("for payloads that lie in read-only memory (a memoryview)", model, received),
            ):
                if list(map(_contents, packer.pack(payloads, budget=budget))) != list(map(_contents, expected)):
                    fault(f"pack() gives other micro-batches {what} (budget of {budget} units); draw and keep nothing")
        if batches := list(model.pack([], budget=ROOM)):
            fault(f"pack([]) gave {len(batches)} micro-batches; give an empty list: a share may have no sequence")

    def test_padding_decides_nothing(self, subject: Subject) -> None:
        """Processes of `cp` and `tp` split units evenly, stages pass on one shape; what is added is neither seen."""
        axes = subject.capabilities.mesh_axes
        if not axes & {"cp", "tp", "pp"}:
            pytest.skip("not declared: none of cp, tp and pp, for which micro-batches are padded")
        if {payload.kind for payload in subject.payloads} == {"latents"}:
            pytest.skip("denoising steps are units that no axis splits")
        with torch.no_grad():
            expected = [subject.decide(batch).logprobs_N for batch in subject.alone]
        for budget in subject.budgets[-3:-1]:
            for is_uniform in (False, True) if "pp" in axes else (False,):
                batches = subject.model.pack(subject.payloads, budget=budget, multiple=_MULTIPLE, is_uniform=is_uniform)
                sizes = sorted({batch.num_units for batch in batches})
                if any(size % _MULTIPLE for size in sizes):
                    fault(f"pack(multiple={_MULTIPLE}) made micro-batches of {sizes} units; pad each to a multiple")
                if is_uniform and len(sizes) > 1:
                    fault(f"pack(is_uniform=True) made micro-batches of {sizes} units; pad all to one size")
                for batch in batches:
                    _check_padded(subject, batch, expected)


def _check_padded(subject: Subject, batch: MicroBatch, expected: Sequence[torch.Tensor]) -> None:
    counts = tuple(len(expected[index]) for index in batch.sequences)
    if batch.num_decisions != counts:
        fault(
            f"payloads {batch.sequences} have {counts} decisions, and num_decisions says {batch.num_decisions} where "
            "the micro-batch is padded"
        )
    with torch.no_grad():
        found = split(batch, subject.decide(batch))
    for index, decided in found.items():
        what = f"log-probs of payload {index}, padded to {batch.num_units} units; let no sequence see padding"
        expect_close(decided.logprobs_N, expected[index], what, rtol=subject.tolerance, atol=subject.tolerance)


def _check_pieces(batches: Sequence[MicroBatch], budget: int) -> None:
    """That the pieces of a sequence are all of it, in order, in micro-batches that follow each other."""
    found: dict[int, list[tuple[int, Piece]]] = {}
    for place, batch in enumerate(batches):
        if batch.spans and len(batch.spans) != len(batch.sequences):
            fault(f"a micro-batch of {len(batch.sequences)} sequences has {len(batch.spans)} spans; give one for each")
        for piece in pieces(batch) if batch.spans else ():
            found.setdefault(piece.sequence, []).append((place, piece))
    for sequence, parts in found.items():
        places = [place for place, _ in parts]
        shown = [f"{piece.number} from {piece.span.first} on of {piece.span.total}" for _, piece in parts]
        ends = [0, *(piece.span.first + piece.number for _, piece in parts)]
        starts = [*(piece.span.first for _, piece in parts), parts[0][1].span.total]
        totals = {piece.span.total for _, piece in parts}
        if places != list(range(places[0], places[0] + len(parts))) or ends != starts or len(totals) > 1:
            fault(
                f"under a budget of {budget} units payload {sequence} is split into {', '.join(shown)}, in the "
                f"micro-batches {places}; give every decision once, in order, in micro-batches that follow each other"
            )


def _check_counts(subject: Subject, batch: MicroBatch) -> None:
    alone = subject.alone
    expected = tuple(alone[index].num_decisions[0] for index in batch.sequences)
    told = tuple(piece.span.total for piece in pieces(batch))
    if told != expected:
        fault(f"payloads {batch.sequences} have {expected} decisions, num_decisions says {told}")
    whole = [piece.sequence for piece in pieces(batch) if piece.number == piece.span.total]
    for index in whole:
        payload = subject.payloads[index]
        if payload.kind == KIND:
            prompt, completion = (len(values(payload, name)) for name in ("prompt", "completion"))
            # The last token predicts nothing, so a plugin may leave it out.
            if alone[index].num_decisions != (completion,) or alone[index].num_units < prompt + completion - 1:
                fault(
                    f"payload {index} has {prompt} and {completion} tokens; num_decisions says "
                    f"{alone[index].num_decisions}, num_units {alone[index].num_units}"
                )
    if batch.num_units < (least := sum(alone[index].num_units for index in whole)):
        fault(
            f"payloads {batch.sequences} alone take {least} units, and together num_units says {batch.num_units}; "
            "count every unit that the forward processes"
        )


def _contents(batch: MicroBatch) -> tuple[object, ...]:
    """A micro-batch as values that can be compared."""
    inputs = {name: (tensor.dtype, tensor.tolist()) for name, tensor in batch.inputs.items()}
    return tuple(batch.sequences), tuple(batch.num_decisions), tuple(batch.spans), batch.num_units, inputs


def _received(payload: Payload) -> Payload:
    arrays = {
        name: attrs.evolve(array, data=memoryview(bytes(array.data)).toreadonly())
        for name, array in payload.arrays.items()
    }
    return Payload(kind=payload.kind, arrays=arrays)
