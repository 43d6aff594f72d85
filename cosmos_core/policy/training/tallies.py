"""What a model counts in a step, summed over all that trained it (see `protocols.AfterStep`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist

from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.protocols import AfterStep, Axis, Mesh, Model

DIFFERENT: Final[tuple[Axis, ...]] = ("dp_replicate", "dp_shard", "cp")
"""Axes whose processes count different things; those of `tp` all count the same."""


class Tallies:
    """A model's counts; of a model that counts nothing, nothing.

    Args:
        model: The model.
        module: Its weights.
        mesh: The processes of the replica.
        device: Where counts are.
    """

    def __init__(self, model: Model, module: torch.nn.Module, mesh: Mesh, device: torch.device) -> None:
        self._model: Final = model if isinstance(model, AfterStep) else None
        self._module: Final = module
        self._nothing: Final = torch.zeros(0, device=device)
        self._groups: Final = [mesh.group(axis) for axis in DIFFERENT if mesh.size(axis) > 1]

    def zero(self) -> None:
        """Forget what was counted."""
        for tally in self._tensors():
            tally.zero_()

    def sum(self, group: GradientGroup) -> None:
        """Add up what was counted over the replica's processes and over all replicas.

        Raises:
            GradientGroupError: The group broke.
        """
        if self._model is None:
            return
        tallies = self._tensors()
        # A stage of a pipeline that counts nothing takes part all the same: its replica agrees on every sum.
        flat = torch.cat([tally.flatten() for tally in tallies]) if tallies else self._nothing
        for each in self._groups:
            dist.all_reduce(flat, group=each)
        group.sum(flat)
        for tally, part in zip(tallies, torch.split(flat, [tally.numel() for tally in tallies]), strict=True):
            tally.copy_(part.view_as(tally))

    def act(self) -> Mapping[str, float]:
        """Let the model act on the sums; its metrics."""
        return {} if self._model is None else self._model.after_step(self._module)

    def _tensors(self) -> list[torch.Tensor]:
        return [] if self._model is None else list(self._model.tallies(self._module))
