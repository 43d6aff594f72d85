"""Where a replica trains."""

from __future__ import annotations

import torch

from cosmos_core.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """The device of `policy.device`: `auto` takes an accelerator if there is one.

    Raises:
        ConfigError: `cuda` is asked for and absent.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("policy.device: 'cuda' is asked for, but torch sees no CUDA device; use 'auto' or 'cpu'")
    return torch.device("cuda", torch.cuda.current_device())
