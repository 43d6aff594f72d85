"""The same training step in any layout: its loss and its gradients, to be compared with one process.

The step is the product's own (`policy.trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from cosmos_core.config.schema import PolicyConfig
from cosmos_core.plugins.recipe import ModelSource
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.trial import Imitation, Stepped, make_trainer, share_of, step_in, train_step, whole, worst_error
from cosmos_core.protocols import Model
from cosmos_core.testing.worlds import run_world
from cosmos_core.types import Payload

__all__ = [
    "CPU",
    "Imitation",
    "PluginModel",
    "Stepped",
    "make_trainer",
    "share_of",
    "step_alone",
    "steps_in_layouts",
    "train_step",
    "whole",
    "worst_error",
]

CPU: Final = torch.device("cpu")


class PluginModel(ModelSource):
    """Makes a plugin's model, in any process."""

    def __call__(self) -> Model:
        """The model."""
        made: Model = PluginSet.load([("model", self.plugin)]).create("model", self.plugin, self.options, self.context)
        return made


def step_alone(
    make: Callable[[], Model], payloads: Sequence[Payload], policy: PolicyConfig, *, dtype: torch.dtype = torch.float32
) -> Stepped:
    """The step in this process."""
    return step_in(make(), payloads, policy, single_world(), dtype)


def steps_in_layouts(
    make: Callable[[], Model],
    payloads: Sequence[Payload],
    policies: Sequence[PolicyConfig],
    *,
    processes: int,
    dtypes: Sequence[torch.dtype] = (),
    timeout_s: float = 200.0,
) -> list[Stepped]:
    """The step in several layouts of as many processes, one after another in the same world.

    Args:
        make: Makes the model, on each process for each layout; can be pickled.
        payloads: The batch.
        policies: A layout each.
        processes: Processes of every layout.
        dtypes: Of the weights in each layout, float32 if not given; with float64 ones a model computes in float64, too.
        timeout_s: Longest time for all of them.

    Raises:
        WorldFailedError: A process failed.
    """
    asked = make, list(payloads), list(zip(policies, dtypes or [torch.float32] * len(policies), strict=True))
    stepped: list[Stepped] = run_world(processes, _steps, *asked, timeout_s=timeout_s)[0]
    return stepped


def _steps(
    make: Callable[[], Model], payloads: Sequence[Payload], layouts: Sequence[tuple[PolicyConfig, torch.dtype]]
) -> list[Stepped]:
    steps = [
        step_in(make(), payloads, policy, World(form_mesh(policy.mesh, "cpu")), dtype) for policy, dtype in layouts
    ]
    return steps if torch.distributed.get_rank() == 0 else []
