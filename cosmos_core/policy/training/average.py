"""The exponential moving average of the weights: spread as they are, and in their place while it is asked or published.

After step k of a stage, average ← d average + (1 - d) weights, where d is `policy.average.decay`, or less while it
grows: min(decay, growth · k), as that of the policy which generates in arXiv:2509.16117.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch.distributed.fsdp import FSDPModule

from cosmos_core.config.schema import AverageConfig
from cosmos_core.models.parallel.lora import trained_tensors
from cosmos_core.policy.training.gradients import local
from cosmos_core.weights.staging import settle

AVERAGE: Final = "average"
"""The role of the average among frozen models, and how its tensors' names begin in checkpoints."""


def averaged_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module that its average has: those that training changes, adapters alone where there are any."""
    still = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in trained_tensors(module).items() if name not in still}


class Average:
    """The average of a module's weights, from those that it is made with on.

    Args:
        config: How slowly it follows.
        module: The weights.

    Attributes:
        tensors: The average's, by name.
    """

    def __init__(self, config: AverageConfig, module: torch.nn.Module) -> None:
        self._config: Final = config
        self._module: Final = module
        self.tensors: Final = {name: tensor.clone() for name, tensor in averaged_tensors(module).items()}

    def decay(self, step: int) -> float:
        """The share of the average that stays.

        Args:
            step: Of the stage, from 1.
        """
        growth = self._config.growth
        return self._config.decay if growth is None else min(self._config.decay, growth * step)

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take in the weights after a step of the stage."""
        share = 1.0 - self.decay(step)
        for average, present in self._pairs():
            average.lerp_(present, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """With the average in place of the weights, which come back bit for bit. All processes of the replica do it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        settle()
        for average, present in self._pairs():
            # One tensor at a time, so that no second copy of the weights is held.
            kept = present.clone()
            present.copy_(average)
            average.copy_(kept)
        # What was cast or gathered before would hide the change.
        torch.clear_autocast_cache()
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This process's parts of each tensor of the average, and of the weights."""
        present = averaged_tensors(self._module)
        for name, average in self.tensors.items():
            yield local(average), local(present[name])
