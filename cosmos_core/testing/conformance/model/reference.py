"""What a token model should say: transformers' own forward of each sequence alone, from the exported files.

Shape legend: U units of a sequence, N decisions of it, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import AutoModelForCausalLM

from cosmos_core.errors import CosmosError, DataError
from cosmos_core.models.tokens import values
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import Decided, MicroBatch, Model, Noising, PipelinedModel
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload, Prompt
from cosmos_core.weights.shards import canonical_tensors


def decisions(model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float) -> list[Decided]:
    """Export the model, load it back with transformers in float32, and evaluate each payload by itself."""
    with tempfile.TemporaryDirectory() as folder:
        model.export(module, Path(folder))
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [_decide(theirs, payload, temperature) for payload in payloads]


def _decide(theirs: Any, payload: Payload, temperature: float) -> Decided:
    prompt, completion = (torch.tensor(values(payload, name).tolist()) for name in ("prompt", "completion"))
    logits_UV = theirs(input_ids=torch.cat([prompt, completion]).long()[None], use_cache=False).logits[0]
    # The last unit predicts nothing; the first decision is taken at the last unit of the prompt.
    logits_NV = logits_UV[len(prompt) - 1 : -1].float() / temperature
    logprobs_NV = logits_NV.log_softmax(-1)
    return Decided(
        logprobs_N=logprobs_NV.gather(1, completion.long()[:, None])[:, 0],
        entropy_N=-(logprobs_NV.exp() * logprobs_NV).nan_to_num(0.0).sum(-1),
    )


ROOM: Final = 1 << 16
"""A budget that takes all payloads of a test at once."""


def decide_each(
    model: Model,
    module: torch.nn.Module,
    payloads: Sequence[Payload],
    *,
    budget: int = ROOM,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> list[Decided]:
    """Pack payloads, evaluate them, and give each its decisions, in the order of `payloads`."""
    found: dict[int, list[Decided]] = {}
    for batch in model.pack(payloads, budget=budget):
        decided = model.decide(module, batch, temperature=temperature, with_entropy=with_entropy)
        for index, piece in split(batch, decided).items():
            found.setdefault(index, []).append(piece)
    if sorted(found) != list(range(len(payloads))):
        fault(f"pack() was given {len(payloads)} payloads and packed those numbered {sorted(found)}")
    return [_joined(found[index]) for index in range(len(payloads))]


def _joined(parts: Sequence[Decided]) -> Decided:
    """A sequence's decisions from those of its pieces, in order."""
    if len(parts) == 1:
        return parts[0]
    entropies = [each.entropy_N for each in parts if each.entropy_N is not None]
    return Decided(
        logprobs_N=torch.cat([each.logprobs_N for each in parts]), entropy_N=torch.cat(entropies) if entropies else None
    )


def split(batch: MicroBatch, decided: Decided) -> dict[int, Decided]:
    """What was decided in a micro-batch, by number of the payload; of one that is split, what is here."""
    total = sum(batch.num_decisions)
    if tuple(decided.logprobs_N.shape) != (total,):
        fault(
            f"decide() gave log-probs of shape {tuple(decided.logprobs_N.shape)} for {total} decisions "
            "(the sum of MicroBatch.num_decisions)"
        )
    sizes = list(batch.num_decisions)
    logprobs = torch.split(decided.logprobs_N, sizes)
    entropies = [None] * len(sizes) if decided.entropy_N is None else torch.split(decided.entropy_N, sizes)
    return {
        index: Decided(logprobs_N=logprobs_N, entropy_N=entropy_N)
        for index, logprobs_N, entropy_N in zip(batch.sequences, logprobs, entropies, strict=True)
    }


def demonstrations(model: Model, prompts: Sequence[Prompt]) -> list[Payload]:
    """The rows that have one, as a policy trains on them: with drawn points, of a model that needs these."""
    shown = [model.encode_demonstration(prompt) for prompt in prompts if prompt.demonstration is not None]
    if not isinstance(model, Noising):
        return shown
    return [model.noised(payload, index) for index, payload in enumerate(shown)]


def splits(model: Model, payload: Payload) -> bool:
    """Whether the model splits sequences over micro-batches."""
    size = pack_alone(model, payload).num_units
    if size < 2:
        return False
    try:
        return len(model.pack([payload], budget=size - 1)) > 1
    except DataError:
        return False


def pack_alone(model: Model, payload: Payload) -> MicroBatch:
    """A payload in a micro-batch of its own."""
    try:
        batches = model.pack([payload], budget=ROOM)
    except DataError as error:
        fault(f"pack() refuses a payload of the kit under a budget of {ROOM} units: {error}")
    if [tuple(batch.sequences) for batch in batches] != [(0,)]:
        fault(f"pack() of one payload gave {len(batches)} micro-batches; give one, whose sequences are (0,)")
    return batches[0]


def total_logprob(
    model: Model, module: torch.nn.Module, batches: Sequence[MicroBatch], *, temperature: float = 1.0
) -> float:
    """The log-probability of everything that was decided, summed in float64."""
    with torch.no_grad():
        parts = [model.decide(module, batch, temperature=temperature).logprobs_N.double().sum() for batch in batches]
    return float(sum(parts))


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the tensors that travel."""
    return {name: tensor.clone() for name, tensor in canonical_tensors(module).items()}


def disturb(module: torch.nn.Module) -> None:
    """Change every element that travels a little, as training would: a zero too, and no sign."""
    generator = torch.Generator().manual_seed(0)
    for tensor in canonical_tensors(module).values():
        if tensor.is_floating_point():
            drawn = 0.1 * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(torch.where(tensor == 0, drawn.abs(), tensor * (1 + drawn)))


def first_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """The first tensor, by name, that is not the same bit for bit in both; None if all are."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            return f"{name} (only one of the two has it)"
        if not torch.equal(one[name], other[name]):
            return name
    return None


_ERROR: Final = 1e-4
"""Largest difference of a log-prob between processes."""


class BrokenPromiseError(CosmosError):
    """A module that is spread over processes does not do what every other part relies on."""


def inspect(model: Model, module: torch.nn.Module, batches: Sequence[MicroBatch], world: World) -> None:
    """Look at a module on every process of a world, all of which have these micro-batches.

    Raises:
        BrokenPromiseError: Processes say different things, or a stage gives what cannot be passed on.
    """
    if world.mesh.size("pp") > 1:
        _inspect_stages(cast("PipelinedModel", model), module, batches, world)
    else:
        _inspect_decisions(model, module, batches, world)


def _inspect_decisions(model: Model, module: torch.nn.Module, batches: Sequence[MicroBatch], world: World) -> None:
    for batch in batches:
        with torch.no_grad():
            logprobs_N = model.decide(module, batch, temperature=1.0).logprobs_N
        total = sum(batch.num_decisions)
        if tuple(logprobs_N.shape) != (total,):
            raise BrokenPromiseError(
                f"decide() gave log-probs of shape {tuple(logprobs_N.shape)} for {total} decisions on rank "
                f"{world.rank}; every process that shares the sequences returns all of their decisions"
            )
        for rank, data in enumerate(world.exchange(logprobs_N.numpy().tobytes())):
            other_N = torch.frombuffer(bytearray(data), dtype=logprobs_N.dtype)
            if not torch.allclose(other_N, logprobs_N, rtol=_ERROR, atol=_ERROR):
                raise BrokenPromiseError(
                    f"decide() gives other log-probs on rank {rank} than on rank {world.rank} for the same "
                    f"micro-batch, by {float((other_N - logprobs_N).abs().max()):.3g}"
                )


def _inspect_stages(
    model: PipelinedModel, module: torch.nn.Module, batches: Sequence[MicroBatch], world: World
) -> None:
    stages = model.stages(module)
    if not stages:
        raise BrokenPromiseError(f"stages() gave none on rank {world.rank}")
    if world.mesh.place("pp") == 0 and model.advance(stages[0], batches[0], None)._is_view():  # noqa: SLF001
        raise BrokenPromiseError("advance() gave a view: what is passed on is detached in place; give a clone")
