"""The model under test with what it is tested on, and what several tests ask of it.

Shape legend: U units of a sequence, N decisions of it, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cosmos_core.errors import DataError
from cosmos_core.models.tokens import values
from cosmos_core.protocols import Decided, MicroBatch, Model, ModelCapabilities, ModelFacts
from cosmos_core.protocols.world import WorldModel
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import CPU, PluginModel
from cosmos_core.types import Payload, Prompt
from cosmos_core.weights.shards import canonical_tensors

T = TypeVar("T")
Reference: TypeAlias = Callable[..., Sequence[Decided]]

SEED: Final = 0
ROOM: Final = 1 << 16
"""A budget that takes all payloads of a test at once."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class Subject:
    """A plugin's model, and what it is tested with.

    Attributes:
        maker: Makes the model, in any process.
        make: Makes the model in this process.
        model: The model, as a replica makes it once planning has made the tokenizer.
        capabilities: Those that it declares.
        prompts: Rows.
        payloads: What is packed and evaluated.
        temperatures: At which decisions are compared with the reference.
        tolerance: Largest difference of a log-prob.
        reference: Gives decisions by other means.
        load_exported: Reads an exported folder.
    """

    maker: PluginModel
    make: Callable[..., Any]
    model: Model
    capabilities: ModelCapabilities
    prompts: Sequence[Prompt]
    payloads: Sequence[Payload]
    temperatures: Sequence[float]
    tolerance: float
    reference: Reference
    load_exported: Callable[[Path], Mapping[str, torch.Tensor]]

    @cached_property
    def module(self) -> torch.nn.Module:
        """The model's weights, as a trainer has them."""
        return self.build()

    @cached_property
    def facts(self) -> ModelFacts:
        """What planning is told of the model."""
        return self.model.facts()

    @cached_property
    def batches(self) -> Sequence[MicroBatch]:
        """The payloads in as few micro-batches as the model makes; mostly one."""
        return self.model.pack(self.payloads, budget=ROOM)

    @property
    def batch(self) -> MicroBatch:
        """The first of them."""
        return self.batches[0]

    @cached_property
    def alone(self) -> list[MicroBatch]:
        """Each payload in a micro-batch of its own."""
        return [self.pack_alone(payload) for payload in self.payloads]

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """Budgets from the longest payload's units to room for all; from half of that if the model splits sequences."""
        sizes = [batch.num_units for batch in self.alone]
        longest, most = self.payloads[int(np.argmax(sizes))], max(sizes)
        is_split = most > 1 and len(attempt(self.model.pack, [longest], budget=most - 1) or ()) > 1
        return (*((most // 2,) if is_split else ()), most, most + min(sizes), ROOM)

    def build(self, seed: int = SEED, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """A module of the model."""
        return self.model.build(seed=seed, dtype=dtype, device=CPU)

    def other_weights(self) -> torch.nn.Module:
        """A module whose every number is another: of a checkpoint, too, which has one set of weights for all seeds."""
        other = self.build(SEED + 1)
        generator = torch.Generator().manual_seed(0)
        for tensor in canonical_tensors(other).values():
            if tensor.is_floating_point():
                # No sign changes: a variance, or a scale, stays one.
                drawn = 0.5 * torch.rand(tensor.shape, generator=generator).clamp_min(0.01)
                tensor.copy_(torch.where(tensor == 0, drawn, tensor * (1 + drawn)))
        return other

    def optional(self, protocol: Any, why: str, uses: Callable[[Any], object] = lambda _: True) -> Any:
        """The model, as one that keeps an optional protocol, and uses it; else the test is skipped."""
        if not isinstance(self.model, protocol) or not uses(self.model):
            pytest.skip(f"not declared: {why} (`{protocol.__name__}`)")
        return self.model

    def pack_alone(self, payload: Payload) -> MicroBatch:
        """A payload in a micro-batch of its own."""
        batches = attempt(self.model.pack, [payload], budget=ROOM)
        if batches is None or [tuple(batch.sequences) for batch in batches] != [(0,)]:
            made = "was refused" if batches is None else f"made {len(batches)} micro-batches"
            fault(f"one payload under a budget of {ROOM} units {made}; pack() gives one, whose sequences are (0,)")
        return batches[0]

    def decide(self, batch: MicroBatch, module: torch.nn.Module | None = None, **asked: Any) -> Decided:
        """What is decided in a micro-batch, at temperature 1 unless another is asked for."""
        asked = {"temperature": 1.0, **asked}
        decided: Decided = self.model.decide(self.module if module is None else module, batch, **asked)
        found, total = tuple(decided.logprobs_N.shape), sum(batch.num_decisions)
        if found != (total,):
            fault(f"decide() gave log-probs {found} for {total} decisions (the sum of MicroBatch.num_decisions)")
        return decided

    def each(
        self,
        module: torch.nn.Module | None = None,
        payloads: Sequence[Payload] | None = None,
        budget: int = ROOM,
        **asked: Any,
    ) -> list[Decided]:
        """Pack payloads, evaluate them, and give each its decisions, in the order of `payloads`."""
        payloads = self.payloads if payloads is None else payloads
        found: dict[int, list[Decided]] = {}
        for batch in self.model.pack(payloads, budget=budget):
            for index, piece in split(batch, self.decide(batch, module, **asked)).items():
                found.setdefault(index, []).append(piece)
        if sorted(found) != list(range(len(payloads))):
            fault(f"pack() was given {len(payloads)} payloads and packed those numbered {sorted(found)}")
        return [_joined(found[index]) for index in range(len(payloads))]

    @torch.no_grad()
    def logprobs(self, *given: Any, **asked: Any) -> list[torch.Tensor]:
        """Log-probs of each payload; see `each`."""
        return [decided.logprobs_N for decided in self.each(*given, **asked)]


def split(batch: MicroBatch, decided: Decided) -> dict[int, Decided]:
    """Split what was decided in a micro-batch by number of the payload; of one that is split, what is here."""
    sizes = list(batch.num_decisions)
    entropies = [None] * len(sizes) if decided.entropy_N is None else torch.split(decided.entropy_N, sizes)
    return {
        index: Decided(logprobs_N=logprobs_N, entropy_N=entropy_N)
        for index, logprobs_N, entropy_N in zip(
            batch.sequences, torch.split(decided.logprobs_N, sizes), entropies, strict=True
        )
    }


def _joined(parts: Sequence[Decided]) -> Decided:
    """A sequence's decisions from those of its pieces, in order."""
    entropies = [each.entropy_N for each in parts if each.entropy_N is not None]
    return Decided(
        logprobs_N=torch.cat([each.logprobs_N for each in parts]), entropy_N=torch.cat(entropies) if entropies else None
    )


def attempt(function: Callable[..., T], *arguments: Any, **named: Any) -> T | None:
    """What a call gives; None if it refuses with a `DataError`."""
    try:
        return function(*arguments, **named)
    except DataError:
        return None


def expect_refusal(what: str, function: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """Fault unless a call raises `DataError`."""
    try:
        function(*arguments, **named)
    except DataError:
        return
    fault(f"{what}; raise DataError")


def skip_rest(lacking: Mapping[str, bool]) -> None:
    """Skip the end of a test that lacks something, and say what: the reasons that are mapped to True."""
    if reasons := [reason for reason, is_lacking in lacking.items() if is_lacking]:
        pytest.skip("; ".join([*reasons, "the other checks of this test passed"]))


def expect_close(
    found: torch.Tensor, expected: torch.Tensor, what: str, *, rtol: float = 1e-4, atol: float = 1e-4
) -> None:
    """Fault with the place that is furthest off, if any is off by more; not-a-number always is."""
    if found.shape != expected.shape:
        fault(f"{what}: {tuple(found.shape)} numbers, expected {tuple(expected.shape)}")
    found, expected = found.detach(), expected.detach()
    excess = ((found - expected).abs() - rtol * expected.abs()).flatten().nan_to_num(nan=float("inf"))
    if len(excess) and float(excess.max()) > atol:
        place = int(excess.argmax())
        values_ = f"{float(found.flatten()[place]):.6g}, expected {float(expected.flatten()[place]):.6g}"
        fault(f"{what}, number {place}: {values_} (tolerance {atol:g})")


def expect_each_close(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str, tolerance: float
) -> None:
    """Fault with the first payload of which decisions are off."""
    for index, (mine_N, theirs_N) in enumerate(zip(found, expected, strict=True)):
        expect_close(mine_N, theirs_N, f"{what}; payload {index}", rtol=tolerance, atol=tolerance)


def demonstrations(model: Model, prompts: Sequence[Prompt]) -> list[Payload]:
    """The rows that have one, as a policy trains on them: with drawn points, of a model that needs these."""
    shown = [model.encode_demonstration(prompt) for prompt in prompts if prompt.demonstration is not None]
    return [model.noised(each, index) for index, each in enumerate(shown)] if isinstance(model, WorldModel) else shown


def tensor(payload: Payload, name: str) -> torch.Tensor:
    """An array of a payload."""
    held = payload.arrays[name]
    return torch.from_numpy(np.frombuffer(bytes(held.data), held.dtype).reshape(held.shape).copy())


def contents(payload: Payload) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The arrays of a payload as what can be compared."""
    return {name: (each.dtype, tuple(each.shape), bytes(each.data)) for name, each in payload.arrays.items()}


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the tensors that travel."""
    return {name: tensor.clone() for name, tensor in canonical_tensors(module).items()}


def first_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """The first tensor, by name, that is not the same bit for bit in both; None if all are."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            return f"{name} (only one of the two has it)"
        if not torch.equal(one[name], other[name]):
            return name
    return None


def reference_decisions(
    model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float
) -> list[Decided]:
    """Export the model, load it back with transformers in float32, and evaluate each payload by itself."""
    with tempfile.TemporaryDirectory() as folder:
        model.export(module, Path(folder))
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for payload in payloads:
        prompt, completion = (torch.tensor(values(payload, name).tolist()) for name in ("prompt", "completion"))
        with torch.no_grad():
            logits_UV = theirs(input_ids=torch.cat([prompt, completion]).long()[None], use_cache=False).logits[0]
        # The last unit predicts nothing; the first decision is taken at the last unit of the prompt.
        logprobs_NV = (logits_UV[len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
        found.append(
            Decided(
                logprobs_N=logprobs_NV.gather(1, completion.long()[:, None])[:, 0],
                entropy_N=-(logprobs_NV.exp() * logprobs_NV).nan_to_num(0.0).sum(-1),
            )
        )
    return found
