"""The canonical tensors of a module: what is published, checkpointed and compared, by Hugging Face name."""

from __future__ import annotations

import torch


def canonical_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once, under their first name) and persistent floating-point buffers, detached, no copies.

    The order is the module's own, the same in every process.
    """
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent and buffer.is_floating_point():
            tensors[name] = buffer.detach()
    return tensors
