"""Packing: each payload once, within the budget, the same each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import pytest
import torch

from cosmos_core.errors import DataError
from cosmos_core.models.tokens import KIND, values
from cosmos_core.policy.training.microbatch import Piece, pieces
from cosmos_core.protocols import MicroBatch, Model, ModelCapabilities
from cosmos_core.testing.conformance.model.subject import ROOM, ModelSetting, pack_alone, split, splits
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_FOREIGN: Final = "no-model-takes-this"


class ModelPacking(ModelSetting):
    """Tests of `pack`."""

    @pytest.fixture
    def budgets(self, model: Model, payloads: Sequence[Payload]) -> tuple[int, ...]:
        """Budgets from the longest payload's units to room for all; from half of that if sequences are split."""
        sizes = [pack_alone(model, payload).num_units for payload in payloads]
        longest = max(range(len(sizes)), key=lambda index: sizes[index])
        halves = (sizes[longest] // 2,) if splits(model, payloads[longest]) else ()
        return (*halves, sizes[longest], sizes[longest] + min(sizes), ROOM)

    def test_each_payload_is_packed_exactly_once(
        self, model: Model, payloads: Sequence[Payload], budgets: Sequence[int]
    ) -> None:
        """A payload that is lost is never learnt from; one that is repeated counts twice."""
        for budget in budgets:
            batches = model.pack(payloads, budget=budget)
            _check_pieces(batches, budget)
            # Of a sequence that is split, its first piece counts.
            counts = Counter(piece.sequence for batch in batches for piece in pieces(batch) if piece.span.first == 0)
            wrong = sorted(index for index in {*counts, *range(len(payloads))} if counts[index] != 1)
            if wrong:
                seen = ", ".join(f"number {index} {counts[index]} times" for index in wrong)
                fault(f"pack() of {len(payloads)} payloads under a budget of {budget} units packed {seen}, not once")

    def test_no_micro_batch_exceeds_the_budget(
        self, model: Model, payloads: Sequence[Payload], budgets: Sequence[int]
    ) -> None:
        """The budget is what fits into memory."""
        for budget in budgets:
            largest = max(batch.num_units for batch in model.pack(payloads, budget=budget))
            if largest > budget:
                fault(f"pack() made a micro-batch of {largest} units under a budget of {budget}")

    def test_a_payload_over_the_budget_is_refused(self, model: Model, payloads: Sequence[Payload]) -> None:
        """It must say so, or split the sequence, rather than cut it or run out of memory."""
        longest = max(payloads, key=lambda payload: pack_alone(model, payload).num_units)
        size = pack_alone(model, longest).num_units
        try:
            batches = model.pack([longest], budget=size - 1)
        except DataError:
            return
        if len(batches) < 2 or any(batch.num_units >= size for batch in batches):
            fault(
                f"pack() took a payload of {size} units under a budget of {size - 1}; raise DataError that "
                "names the payload and policy.micro_batch_units, or split it (`MicroBatch.spans`)"
            )

    def test_decisions_and_units_are_counted_truly(
        self, model: Model, payloads: Sequence[Payload], budgets: Sequence[int]
    ) -> None:
        """Averages of the loss and the speed of a step are made of these numbers."""
        alone = [pack_alone(model, payload) for payload in payloads]
        for index, (payload, batch) in enumerate(zip(payloads, alone, strict=True)):
            _check_tokens(index, payload, batch)
        for batch in model.pack(payloads, budget=budgets[1]):
            expected = tuple(alone[index].num_decisions[0] for index in batch.sequences)
            told = tuple(piece.span.total for piece in pieces(batch))
            if told != expected:
                fault(f"payloads {batch.sequences} have {expected} decisions, num_decisions says {told}")
            least = sum(alone[piece.sequence].num_units for piece in pieces(batch) if piece.number == piece.span.total)
            if batch.num_units < least:
                fault(
                    f"payloads {batch.sequences} alone take {least} units, and together num_units says "
                    f"{batch.num_units}; count every unit that the forward processes"
                )

    def test_packing_is_deterministic(
        self, model: Model, make: Callable[..., Any], payloads: Sequence[Payload], budgets: Sequence[int]
    ) -> None:
        """A resumed run, and every replica, pack the same payloads in the same way."""
        for budget in budgets:
            first, again, other = (each.pack(payloads, budget=budget) for each in (model, model, make()))
            for what, batches in (("a second time", again), ("by another instance", other)):
                if list(map(_contents, batches)) != list(map(_contents, first)):
                    fault(f"pack() gives other micro-batches {what} (budget of {budget} units); draw and keep nothing")

    def test_nothing_is_packed_into_nothing(self, model: Model) -> None:
        """A replica's share may have no sequence with an advantage."""
        batches = model.pack([], budget=ROOM)
        if list(batches):
            fault(f"pack([]) gave {len(batches)} micro-batches; give an empty list")

    def test_payloads_in_received_memory_are_packed(
        self, model: Model, payloads: Sequence[Payload], budgets: Sequence[int]
    ) -> None:
        """A payload arrives as read-only views of network frames, never as arrays that may be written."""
        received = [_received(payload) for payload in payloads]
        mine, theirs = (model.pack(each, budget=budgets[0]) for each in (received, payloads))
        if list(map(_contents, mine)) != list(map(_contents, theirs)):
            fault("pack() gives other micro-batches for payloads that lie in read-only memory (a memoryview)")

    def test_inputs_are_tensors_on_the_cpu(self, model: Model, payloads: Sequence[Payload]) -> None:
        """`decide` moves them: packing runs before a device is needed."""
        for batch in model.pack(payloads, budget=ROOM):
            for name, tensor in batch.inputs.items():
                if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                    fault(f"MicroBatch.inputs[{name!r}] is {type(tensor).__name__}; give a torch.Tensor on the CPU")

    def test_a_kind_that_is_not_declared_is_refused(self, model: Model, capabilities: ModelCapabilities) -> None:
        """A payload that only looks like one of ours must not be trained on."""
        assert _FOREIGN not in capabilities.payload_kinds
        try:
            model.pack([Payload(kind=_FOREIGN, arrays={})], budget=ROOM)
        except DataError:
            return
        fault(
            f"pack() took a payload of kind {_FOREIGN!r}, and the plugin declares "
            f"{', '.join(sorted(capabilities.payload_kinds))}; raise DataError"
        )


def _check_pieces(batches: Sequence[MicroBatch], budget: int) -> None:
    """That the pieces of a sequence are all of it, in order, in micro-batches that follow each other."""
    found: dict[int, list[tuple[int, Piece]]] = {}
    for place, batch in enumerate(batches):
        if batch.spans and len(batch.spans) != len(batch.sequences):
            fault(f"a micro-batch of {len(batch.sequences)} sequences has {len(batch.spans)} spans; give one for each")
        for piece in pieces(batch):
            found.setdefault(piece.sequence, []).append((place, piece))
    for sequence, parts in found.items():
        if not any(batches[place].spans for place, _ in parts):
            continue
        shown = [f"{piece.number} from {piece.span.first} on of {piece.span.total}" for _, piece in parts]
        ends = [0, *(piece.span.first + piece.number for _, piece in parts)]
        follow = [place - parts[0][0] for place, _ in parts] == list(range(len(parts)))
        whole = ends[:-1] == [piece.span.first for _, piece in parts] and {ends[-1]} == {
            piece.span.total for _, piece in parts
        }
        if not (follow and whole):
            fault(
                f"under a budget of {budget} units payload {sequence} is split into {', '.join(shown)}, in the "
                f"micro-batches {[place for place, _ in parts]}; give every decision once, in order, in micro-batches "
                "that follow each other"
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


def _check_tokens(index: int, payload: Payload, batch: MicroBatch) -> None:
    """A token payload says itself what it has."""
    if payload.kind != KIND:
        return
    prompt, completion = (len(values(payload, name)) for name in ("prompt", "completion"))
    if batch.num_decisions != (completion,):
        fault(f"payload {index} has {completion} completion tokens, num_decisions says {batch.num_decisions}")
    # The last token predicts nothing, so a plugin may leave it out.
    if batch.num_units < prompt + completion - 1:
        fault(f"payload {index} has {prompt + completion} tokens, num_units says {batch.num_units}")


_MULTIPLE: Final = 7
"""One that no size of a test happens to be a multiple of."""


class ModelPadding(ModelSetting):
    """Tests of `pack(multiple=, is_uniform=)` of a model with `cp`, `tp` or `pp`."""

    @pytest.fixture
    def padded(
        self, model: Model, payloads: Sequence[Payload], capabilities: ModelCapabilities
    ) -> Sequence[Sequence[MicroBatch]]:
        """Micro-batches as each declared axis wants them, of two payloads or more and of one."""
        if not capabilities.mesh_axes & {"cp", "tp", "pp"}:
            pytest.skip("not declared: none of cp, tp and pp, for which micro-batches are padded")
        if {payload.kind for payload in payloads} == {"latents"}:
            pytest.skip("denoising steps are units that no axis splits")
        sizes = [pack_alone(model, payload).num_units for payload in payloads]
        uniform = (False, True) if "pp" in capabilities.mesh_axes else (False,)
        return [
            model.pack(payloads, budget=budget, multiple=_MULTIPLE, is_uniform=is_uniform)
            for budget in (max(sizes), max(sizes) + min(sizes))
            for is_uniform in uniform
        ]

    def test_padded_micro_batches_have_the_sizes_asked_for(
        self, capabilities: ModelCapabilities, padded: Sequence[Sequence[MicroBatch]]
    ) -> None:
        """Processes of `cp` and `tp` split the units evenly, and stages of a pipeline pass on one shape."""
        for batches in padded:
            if odd := [batch.num_units for batch in batches if batch.num_units % _MULTIPLE]:
                fault(f"pack(multiple={_MULTIPLE}) made micro-batches of {odd} units; pad each to a multiple")
        if "pp" not in capabilities.mesh_axes:
            return
        for batches in padded[1::2]:
            if len(sizes := {batch.num_units for batch in batches}) > 1:
                fault(f"pack(is_uniform=True) made micro-batches of {sorted(sizes)} units; pad all to one size")

    def test_padding_decides_nothing(
        self,
        model: Model,
        module: torch.nn.Module,
        payloads: Sequence[Payload],
        padded: Sequence[Sequence[MicroBatch]],
    ) -> None:
        """A decision that nobody took would be learned, and what is seen of padding would change every other."""
        alone = [pack_alone(model, payload) for payload in payloads]
        with torch.no_grad():
            expected = [model.decide(module, batch, temperature=1.0).logprobs_N for batch in alone]
        for batch in (batch for batches in padded for batch in batches):
            counts = tuple(alone[index].num_decisions[0] for index in batch.sequences)
            if batch.num_decisions != counts:
                fault(
                    f"payloads {batch.sequences} have {counts} decisions, and num_decisions says "
                    f"{batch.num_decisions} where the micro-batch is padded"
                )
            with torch.no_grad():
                found = split(batch, model.decide(module, batch, temperature=1.0))
            for index, decided in found.items():
                if not decided.logprobs_N.numel():
                    continue
                error = float((decided.logprobs_N - expected[index]).abs().max())
                if not error <= self.tolerance * (1 + float(expected[index].abs().max())):
                    fault(
                        f"the log-probs of payload {index} change by {error:.3g} where its micro-batch is padded to "
                        f"{batch.num_units} units; let no sequence see padding"
                    )
