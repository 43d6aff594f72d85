"""Progress of a forward and backward: without it, a long step looks like one that hangs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cosmos_core.replica.activity import Activity


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
