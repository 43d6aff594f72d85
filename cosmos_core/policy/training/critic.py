"""The critic: a linear head that estimates, from what the policy knows at a decision, the return that is to come.

Every process of a replica has all of it. Its gradient is summed over those that have sequences of their own, and over
replicas; its optimizer is its own.

Shape legend: N decisions of a micro-batch, D features of each.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch

from cosmos_core.config.schema import CriticConfig, OptimizerConfig
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.gradients import GradientBuffer
from cosmos_core.policy.training.optimizers import Optimizer
from cosmos_core.protocols import Decided


class Critic:
    """The head and its optimizer.

    Args:
        config: Learning rate, and whether its error trains the policy's layers too.
        num_features: D.
        device: Where it is.
    """

    def __init__(self, config: CriticConfig, num_features: int, device: torch.device) -> None:
        self._config: Final = config
        self._head = torch.nn.Linear(num_features, 1, device=device)
        self._gradients: Final = GradientBuffer(dict(self._head.named_parameters()))
        self._optimizer: Optimizer

    def begin_stage(self, optimizer: OptimizerConfig) -> None:
        """Know nothing, with a fresh optimizer of the policy's kind."""
        # Before it has learnt anything, no return is expected.
        for parameter in self._head.parameters():
            torch.nn.init.zeros_(parameter)
        self._optimizer = Optimizer(self._head, attrs.evolve(optimizer, lr=self._config.lr))

    def judge(self, decided: Decided) -> Decided:
        """The same with values instead of features."""
        features_ND = decided.features_ND
        assert features_ND is not None, "a model is asked for features where there is a critic"
        if not self._config.trunk:
            features_ND = features_ND.detach()
        with torch.autocast(features_ND.device.type, enabled=False):
            values_N = self._head(features_ND.float())[:, 0]
        return attrs.evolve(decided, values_N=values_N, features_ND=None)

    def zero(self) -> None:
        """Forget what was accumulated."""
        self._gradients.zero()

    def reduce(self, world: World, group: GradientGroup, *, counts: bool) -> float:
        """Sum the gradient over all processes that have sequences of their own; its norm.

        Args:
            world: The processes of this replica.
            group: The replicas.
            counts: Whether this process's part counts: those that share sequences have the same one.

        Raises:
            GradientGroupError: The group broke.
        """
        self._gradients.collect()
        if not counts:
            self._gradients.flat.zero_()
        world.sum(self._gradients.flat)
        group.sum(self._gradients.flat)
        return float(self._gradients.flat.norm())

    def step(self, norm: float, clip_norm: float) -> None:
        """Apply the gradient.

        Args:
            norm: Of the gradient.
            clip_norm: Largest norm of it; 0 does not clip.
        """
        self._gradients.clip(norm, clip_norm)
        self._optimizer.step(self._config.lr, 0.0)

    def held(self) -> list[torch.Tensor]:
        """Every tensor of it."""
        return [*self._head.parameters(), self._gradients.flat, *self._optimizer.held()]

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor that it goes on from, by name; no copies."""
        own = {name: parameter.detach() for name, parameter in self._head.named_parameters()}
        return own | {f"optimizer.{name}": tensor for name, tensor in self._optimizer.state().items()}
