"""Runs micro-batches through a module: one after the other, or through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias, cast

import torch

from cosmos_core.models.parallel.forwards import layout_of
from cosmos_core.policy.mesh.pipeline import Forward, Pipeline
from cosmos_core.policy.mesh.schedules import Schedule
from cosmos_core.protocols import Decided, MicroBatch, Model
from cosmos_core.protocols.frozen import KLTarget
from cosmos_core.protocols.layout import Mesh
from cosmos_core.protocols.model import PipelinedModel
from cosmos_core.replica.activity import Activity
from cosmos_core.replica.profiler import span


class Sequential:
    """Evaluates micro-batches with a whole module, and computes gradients of them.

    Every process of a replica calls it with the same number of micro-batches, for they meet in each forward.

    Args:
        model: Evaluates the module.
        module: Its weights.
    """

    concludes = True
    """Whether this process has the last stage, and learns what is decided."""

    def __init__(self, model: Model, module: torch.nn.Module) -> None:
        self._model: Final = model
        self._module: Final = module

    def evaluate(
        self, batches: Sequence[MicroBatch], forward: Forward, judge: Callable[[Decided], Decided] | None = None
    ) -> list[Decided]:
        """Evaluate without gradients; the decisions of each micro-batch.

        Args:
            batches: The micro-batches.
            forward: What their forwards give.
            judge: Gives what is kept of each in its place, before the next is evaluated.
        """
        found = []
        with torch.no_grad():
            for batch in batches:
                decided = self._model.decide(self._module, batch, **forward.arguments())
                found.append(decided if judge is None else judge(decided))
        return found

    def train(
        self,
        batches: Sequence[MicroBatch],
        forward: Forward,
        loss: Callable[[int, Decided], torch.Tensor],
        kl_targets: Sequence[KLTarget] = (),
    ) -> None:
        """Run forward and backward of each micro-batch; gradients are added to those there are.

        Args:
            batches: The micro-batches.
            forward: What their forwards give.
            loss: Gives the scalar to differentiate, for the index of a micro-batch and its decisions; called once for
                each, in any order, and only where the last stage is.
            kl_targets: For each of the first micro-batches, its comparison with a frozen model; where the last stage
                is.
        """
        for index, batch in enumerate(batches):
            with span("forward"):
                decided = self._model.decide(self._module, batch, **forward.arguments(kl_targets[index : index + 1]))
                total = loss(index, decided)
            with span("backward"):
                total.backward()  # type: ignore[no-untyped-call]


Executor: TypeAlias = Sequential | Pipeline
"""Evaluates micro-batches, and computes gradients of them (see `Sequential`)."""


def make_executor(model: Model, module: torch.nn.Module, mesh: Mesh, schedule: Schedule) -> Executor:
    """Make what runs a module that was built for a mesh.

    Args:
        model: Evaluates the module; a `PipelinedModel` where the mesh has a pipeline.
        module: What `model.build` gave.
        mesh: The processes of the replica.
        schedule: Order of micro-batches in a pipeline.
    """
    if mesh.size("pp") == 1:
        return Sequential(model, module)
    pipelined = cast("PipelinedModel", model)
    layouts = [layout for stage in pipelined.stages(module) if (layout := layout_of(stage)) is not None]
    frees_weights = any(layout.reshard_after_forward for layout in layouts)
    is_whole = frees_weights or any(layout.compile or layout.recompute != "none" for layout in layouts)
    return Pipeline(pipelined, module, mesh, schedule, splits_backward=not is_whole, keeps_gradients=not frees_weights)


def watch_layers(module: torch.nn.Module, activity: Activity) -> None:
    """Count each forward of the model, and of each of its layers, as progress, whatever calls them.

    Recomputed activations and the stages of a pipeline go through their layers, too, where nobody calls the model.
    """

    def advance(*_: object) -> None:
        activity.advance()

    for watched in (module, *_layers(module)):
        watched.register_forward_hook(advance)


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The members of the outermost lists of modules."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)
