"""Compiles the layers of a model (`policy.parallel.compile`), alike ones once and for rows of any length.

torch keeps graphs by the code that they were made of, which all layers of a class share, so their number grows with the
kinds of layers and of calls, not with layers. It makes a graph for the first length of rows, and one for any other.
Attention stays outside: a layer is several graphs. Between its passes each keeps what torch's partitioner chooses, or
under `selective` recompute the fewest bytes of which nothing but products and reductions has to be computed again.

Source: arXiv:2205.05198 section 5 (selective). Deviation: results of products that no gradient needs are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo import config, lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._functorch import config as partitioner
from torch.utils.checkpoint import CheckpointPolicy

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.parallel.forwards import SAVED, recompute_layer, surround
from cosmos_core.models.weights.loading import first_line
from cosmos_core.protocols import Layout

BACKEND: str = "inductor"
"""The name of torch's compiler; tests take one that needs no C++ compiler."""

_MOST_GRAPHS: Final = 64
"""Graphs of one piece of code: kinds of layers, with gradients and without, of the first length and of any."""


def economise(layer: nn.Module, layout: Layout) -> None:
    """Compile a layer and recompute what it does not keep, as the layout says, in place."""
    if layout.compile:
        _compile(layer, selects=layout.recompute == "selective")
    if layout.recompute == "full" or not layout.compile:
        recompute_layer(layer, layout.recompute)


def _compile(layer: nn.Module, *, selects: bool) -> None:
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    # Past the limit torch would run what it compiled as it is, and say nothing.
    config.fail_on_recompile_limit_hit = True
    layer.forward = torch.compile(layer.forward, backend=_select if selects else BACKEND)

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise PluginIncompatibleError(
                f"policy.parallel.compile: {type(layer).__name__} needs ever more graphs: "
                f"{first_line(error.__cause__ or error)}; set policy.parallel.compile = 'off', or see why with "
                "TORCH_LOGS=recompiles"
            ) from error

    surround(layer, around)


def _select(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Compile a graph whose backward pass computes again all but products and reductions."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            # torch's own list of products lacks the grouped ones.
            if str(getattr(node.target, "__name__", "")).partition(".")[0] in SAVED:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with partitioner.patch(aggressive_recomputation=True):
        return lookup_backend(BACKEND)(graph, inputs)
