"""How micro-batches go through a module: one after the other, or through the stages of a pipeline.

Every process of a replica calls an executor with the same number of micro-batches, for they meet in each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import torch

from cosmos_core.models.parallel.rooted import layout_of
from cosmos_core.policy.mesh.pipeline import Pipeline, beside
from cosmos_core.policy.mesh.schedules import Schedule
from cosmos_core.protocols import Comparison, Decided, KLTarget, Mesh, MicroBatch, Model, PipelinedModel


class Executor(Protocol):
    """Evaluates micro-batches, and computes gradients of them."""

    @property
    def concludes(self) -> bool:
        """Whether this process has the last stage, and so learns what is decided."""
        ...

    def evaluate(
        self,
        batches: Sequence[MicroBatch],
        *,
        temperature: float,
        with_entropy: bool = False,
        prediction_for: Comparison | None = None,
        with_features: bool = False,
        judge: Callable[[Decided], Decided] | None = None,
    ) -> list[Decided] | None:
        """Evaluate without gradients.

        Args:
            batches: The micro-batches.
            temperature: Of the distributions.
            with_entropy: Whether the entropy is needed.
            prediction_for: The comparison that the predictions are needed for.
            with_features: Whether features are needed.
            judge: Gives what is kept of each in its place, before the next is evaluated.

        Returns:
            What is decided in each; None on a process that has no last stage.
        """
        ...

    def train(
        self,
        batches: Sequence[MicroBatch],
        *,
        temperature: float,
        with_entropy: bool,
        loss: Callable[[int, Decided], torch.Tensor],
        kl_target: Sequence[KLTarget] = (),
        with_features: bool = False,
    ) -> None:
        """Run forward and backward of each micro-batch; gradients are added to those there are.

        Args:
            batches: The micro-batches.
            temperature: Of the distributions.
            with_entropy: Whether the entropy is needed.
            loss: Gives the scalar to differentiate, for the index of a micro-batch and what is decided in it; called
                once for each, in any order, and only where the last stage is.
            kl_target: What each of the first micro-batches is compared with; where the last stage is.
            with_features: Whether features are needed.
        """
        ...


class Sequential:
    """Runs whole modules.

    Args:
        model: Evaluates the module.
        module: Its weights.
    """

    def __init__(self, model: Model, module: torch.nn.Module) -> None:
        self._model: Final = model
        self._module: Final = module

    @property
    def concludes(self) -> bool:
        """Each process has all of it."""
        return True

    def evaluate(
        self,
        batches: Sequence[MicroBatch],
        *,
        temperature: float,
        with_entropy: bool = False,
        prediction_for: Comparison | None = None,
        with_features: bool = False,
        judge: Callable[[Decided], Decided] | None = None,
    ) -> list[Decided]:
        """Evaluate without gradients."""
        besides = beside(prediction_for=prediction_for, with_features=with_features or None)
        found = []
        with torch.no_grad():
            for batch in batches:
                decided = self._model.decide(
                    self._module, batch, temperature=temperature, with_entropy=with_entropy, **besides
                )
                found.append(decided if judge is None else judge(decided))
        return found

    def train(
        self,
        batches: Sequence[MicroBatch],
        *,
        temperature: float,
        with_entropy: bool,
        loss: Callable[[int, Decided], torch.Tensor],
        kl_target: Sequence[KLTarget] = (),
        with_features: bool = False,
    ) -> None:
        """Run forward and backward of each micro-batch; gradients are added to those there are."""
        for index, batch in enumerate(batches):
            besides = beside(
                kl_target=kl_target[index] if index < len(kl_target) else None, with_features=with_features or None
            )
            decided = self._model.decide(
                self._module, batch, temperature=temperature, with_entropy=with_entropy, **besides
            )
            loss(index, decided).backward()  # type: ignore[no-untyped-call]


def make_executor(model: Model, module: torch.nn.Module, mesh: Mesh, schedule: Schedule) -> Executor:
    """What runs a module that was built for a mesh.

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
