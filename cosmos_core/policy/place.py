"""Which place of its replica a process has, in words."""

from __future__ import annotations

from typing import get_args

from torch import nn

from cosmos_core.models.parallel.stages import part_of, stages_of
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import Axis


def place_of(world: World, module: nn.Module) -> str:
    """This process's place in its replica, in words: on every axis that has several, and the layers of its stages.

    Args:
        world: The replica's processes.
        module: What this process holds of the model.
    """
    if world.size == 1:
        return "the replica's only process"
    mesh = world.mesh
    axes = [f"{axis} {mesh.place(axis)} of {mesh.size(axis)}" for axis in get_args(Axis) if mesh.size(axis) > 1]
    parts = [part for stage in stages_of(module) if (part := part_of(stage)) is not None]
    layers = [f"{part.layers.start} to {part.layers.stop - 1}" for part in parts]
    held = [f"layers {' and '.join(layers)}"] if layers else []
    return ", ".join((f"rank {world.rank} of {world.size}", *axes, *held))
