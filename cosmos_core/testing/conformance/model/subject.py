"""The model under test with what it is tested on, and comparisons that fail with a message for its author.

Shape legend: N decisions of a micro-batch, or of one payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.errors import DataError
from cosmos_core.protocols import Decided, MicroBatch, Model, ModelCapabilities, ModelContext, ModelFacts
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import CPU, PluginModel
from cosmos_core.types import Payload, Prompt
from cosmos_core.weights.shards import canonical_tensors

T = TypeVar("T")

SEED: Final = 0
ROOM: Final = 1 << 16
"""A budget that takes all payloads of a test at once."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class Subject:
    """A plugin's model, and what it is tested with.

    Attributes:
        kit: The test class, made: its settings, and the methods that its author may override.
        maker: Makes the model, in any process.
        model: The model, as a replica makes it once planning has made the tokenizer.
        capabilities: Those that it declares.
        prompts: Rows.
        payloads: What is packed and evaluated.
    """

    kit: Any
    maker: PluginModel
    model: Model
    capabilities: ModelCapabilities
    prompts: Sequence[Prompt]
    payloads: Sequence[Payload]

    @cached_property
    def module(self) -> torch.nn.Module:
        """The model's weights, as a trainer has them."""
        return self.build()

    @cached_property
    def facts(self) -> ModelFacts:
        """The facts of the model that planning is told."""
        return self.model.facts()

    @property
    def temperature(self) -> float:
        """The first that is not 1, at which a forgotten division would not show; 1 if there is no other."""
        return next((each for each in self.kit.temperatures if each != 1.0), 1.0)

    @cached_property
    def batches(self) -> Sequence[MicroBatch]:
        """The payloads in as few micro-batches as the model makes; mostly one."""
        return self.model.pack(self.payloads, budget=ROOM)

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
        for each in canonical_tensors(other).values():
            if each.is_floating_point():
                # No sign changes: a variance, or a scale, stays one.
                drawn = 0.5 * torch.rand(each.shape, generator=generator).clamp_min(0.01)
                each.copy_(torch.where(each == 0, drawn, each * (1 + drawn)))
        return other

    def export(self, module: torch.nn.Module, folder: Path, dtype: torch.dtype | None = None) -> Sequence[torch.dtype]:
        """Let the model write into a folder that is made for it, as `cosmos export` does."""
        folder.mkdir()
        try:
            return self.model.export(module, folder, dtype=dtype)
        except OSError as error:
            fault(f"export() fails in a folder that its caller has made, and that is empty: {error!r}; write into it")

    def from_folder(self, folder: Path) -> Subject:
        """The same with a model from an exported folder."""
        context = ModelContext(path=str(folder), config=None, assets=folder / "nothing-made-locally")
        return attrs.evolve(self, model=attrs.evolve(self.maker, context=context)())

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

    def decide(
        self, batch: MicroBatch, module: torch.nn.Module | None = None, *, temperature: float = 1.0, **asked: Any
    ) -> Decided:
        """The decisions of a micro-batch."""
        module = self.module if module is None else module
        decided: Decided = self.model.decide(module, batch, temperature=temperature, **asked)
        expect_tensor(
            f"logprobs_N of decide({asked})", decided.logprobs_N, (sum(batch.num_decisions),), has_gradient=True
        )
        return decided

    @torch.no_grad()
    def logprobs(
        self,
        module: torch.nn.Module | None = None,
        batches: Sequence[MicroBatch] | None = None,
        name: str = "logprobs_N",
        **asked: Any,
    ) -> list[torch.Tensor]:
        """Log-probs, or what else `Decided` has by `name`, of each payload, from micro-batches that have them all."""
        batches = self.batches if batches is None else batches
        values = [getattr(self.decide(batch, module, **asked), name) for batch in batches]
        return by_payload(len(self.payloads), batches, values)

    @torch.no_grad()
    def logprobs_alone(self, module: torch.nn.Module | None = None) -> list[torch.Tensor]:
        """Log-probs of each payload in a micro-batch of its own."""
        return [self.decide(batch, module).logprobs_N for batch in self.alone]


def by_payload(number: int, batches: Sequence[MicroBatch], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values [N] of the decisions of each payload, of those [N] of each micro-batch."""
    found: list[list[torch.Tensor]] = [[torch.zeros(0)] for _ in range(number)]
    for batch, values_N in zip(batches, values, strict=True):
        for index, part_N in zip(batch.sequences, torch.split(values_N, list(batch.num_decisions)), strict=True):
            found[index].append(part_N)
    return list(map(torch.cat, found))


def attempt(function: Callable[..., T], *arguments: Any, **named: Any) -> T | None:
    """The result of a call; None if it refuses with a `DataError`."""
    try:
        return function(*arguments, **named)
    except DataError:
        return None


def expect_refusal(what: str, function: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """Fault unless a call raises `DataError`."""
    if attempt(lambda: (function(*arguments, **named),)) is not None:
        fault(f"{what}; raise DataError")


def skip_rest(lacking: Mapping[str, bool]) -> None:
    """Skip the end of a test that lacks something, and say what: the reasons that are mapped to True."""
    if reasons := [reason for reason, is_lacking in lacking.items() if is_lacking]:
        pytest.skip("; ".join([*reasons, "the other checks of this test passed"]))


def expect_tensor(
    what: str,
    found: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    has_gradient: bool | None = None,
) -> torch.Tensor:
    """The tensor; fault unless it is finite, of this shape and dtype, and its gradient is recorded as it should be."""
    told = "None" if found is None else f"{found.dtype} {list(found.shape)}"
    if found is None or told != f"{dtype} {list(shape)}" or not bool(found.isfinite().all()):
        fault(f"{what} is {told}, expected finite {dtype} {list(shape)}: {found}")
    if has_gradient is not None and found.requires_grad != (has_gradient and torch.is_grad_enabled()):
        fault(f"{what} carries {'a gradient; detach it' if found.requires_grad else 'no gradient'}")
    return found


def expect_close(
    found: torch.Tensor, expected: torch.Tensor, what: str, *, rtol: float = 1e-4, atol: float = 1e-4
) -> None:
    """Fault with the place that is furthest off, if any is off by more; not-a-number always is."""
    if found.shape != expected.shape:
        fault(f"{what}: {tuple(found.shape)} numbers, expected {tuple(expected.shape)}")
    found, expected = found.detach().flatten(), expected.detach().flatten()
    excess = ((found - expected).abs() - rtol * expected.abs()).nan_to_num(nan=float("inf"))
    if len(excess) and float(excess.max()) > atol:
        place = int(excess.argmax())
        numbers = f"{float(found[place]):.6g}, expected {float(expected[place]):.6g}"
        fault(f"{what}, number {place}: {numbers} (tolerance {atol:g})")


def expect_each_close(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str, tolerance: float
) -> None:
    """Fault with the first payload of which decisions are off."""
    for index, (mine_N, theirs_N) in enumerate(zip(found, expected, strict=True)):
        expect_close(mine_N, theirs_N, f"{what}; payload {index}", rtol=tolerance, atol=tolerance)


def tensor_of(payload: Payload, name: str) -> torch.Tensor:
    """A copy of an array of a payload."""
    held = payload.arrays.get(name)
    if held is None:
        fault(f"a payload of kind {payload.kind!r} has no array {name!r}; it has {', '.join(payload.arrays) or 'none'}")
    return torch.from_numpy(np.frombuffer(held.data, np.dtype(held.dtype)).reshape(held.shape).copy())


def contents(payload: Payload) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The arrays of a payload as what can be compared."""
    return {name: (each.dtype, tuple(each.shape), bytes(each.data)) for name, each in payload.arrays.items()}


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the tensors that travel."""
    return {name: each.clone() for name, each in canonical_tensors(module).items()}


def first_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """The first tensor, by name, that is not the same bit for bit in both; None if all are."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            return f"{name} (only one of the two has it)"
        if not torch.equal(one[name], other[name]):
            return name
    return None
