"""Which linear layers of a model compute in 8 bits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

from cosmos_core.errors import ConfigError
from cosmos_core.models.parallel.fit import is_computed, skip_problems
from cosmos_core.models.parallel.float8_linear import compute_in_float8
from cosmos_core.protocols import Layout

_LOG: Final = logging.getLogger(__name__)

LEAST_CAPABILITY: Final[Mapping[str, tuple[int, int]]] = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""Of a CUDA device that has the products."""


def install_float8(module: PreTrainedModel, layout: Layout) -> None:
    """Make the linear layers of the decoder, and the output layer, compute in 8 bits, but for those to skip.

    Comes before anything that splits them. Other parts, such as a vision tower, and fused experts stay as they are.

    Args:
        module: The model or a stage of it, on any device.
        layout: Says how, and what to skip.
    """
    if layout.float8 == "none":
        return
    for name, linear in candidates(module).items():
        if is_computed(name, layout.float8_skip):
            compute_in_float8(linear, layout.float8)


def check_float8(module: PreTrainedModel, layout: Layout, device: torch.device) -> None:
    """Refuse what cannot be computed in 8 bits, before anything is built.

    Args:
        module: The whole model, on any device.
        layout: Says how, and what to skip.
        device: Where it will compute.

    Raises:
        ConfigError: The device has no such products, no layer is left, or what is to be skipped is not there.
    """
    if layout.float8 == "none":
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY[layout.float8]:
        have, need = (".".join(map(str, each)) for each in (
            torch.cuda.get_device_capability(device), LEAST_CAPABILITY[layout.float8]
        ))  # fmt: skip
        raise ConfigError(
            f"policy.float8.scaling: {layout.float8!r} needs an accelerator of compute capability {need} or more, "
            f"and {torch.cuda.get_device_name(device)} has {have}; set it to 'none'"
        )
    found = candidates(module)
    if problems := list(skip_problems(layout.float8_skip, found, type(module).__name__)):
        raise ConfigError("\n".join(problems))
    chosen = [name for name in found if is_computed(name, layout.float8_skip)]
    skipped = sorted({name.rpartition(".")[2] for name in found if name not in chosen})
    _LOG.info(
        "float8, %s: %d of %d linear layers%s",
        layout.float8, len(chosen), len(found), f"; not {', '.join(skipped)}" if skipped else "",
    )  # fmt: skip


def candidates(module: PreTrainedModel) -> dict[str, nn.Linear]:
    """Linear layers of the decoder and the output layer, by name."""
    inside = {*module.get_decoder().modules(), module.get_output_embeddings()}
    return {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear) and child in inside}
