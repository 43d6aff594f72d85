"""What a model promises of a module that is spread over processes, besides the numbers of a step.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import torch

from cosmos_core.errors import CosmosError
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import MicroBatch, Model, PipelinedModel

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
