"""Fused AdamW whose state exists from the start and is kept by parameter name."""

from __future__ import annotations

from typing import Final

import torch

from cosmos_core.config.schema import OptimizerConfig

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
COUNT: Final = "step"


class AdamW:
    """AdamW (1711.05101) over the trainable parameters of a module, moments in float32.

    Args:
        module: Its parameters are updated in place.
        config: Betas and epsilon; learning rate and weight decay are given at each step.
    """

    def __init__(self, module: torch.nn.Module, config: OptimizerConfig) -> None:
        self._named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._named.values()),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # Torch fills the state at the first step; filled here, a checkpoint or a joining replica finds it before that.
        for parameter in self._named.values():
            self._optimizer.state[parameter] = {
                COUNT: torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in MOMENTS},
            }

    def step(self, lr: float, weight_decay: float) -> None:
        """Apply the gradients that the parameters hold."""
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, weight_decay
        self._optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """The state as `<parameter>.<key>` -> tensor, in a fixed order; no copies, so writing into it changes it."""
        return {
            f"{name}.{key}": self._optimizer.state[parameter][key]
            for name, parameter in self._named.items()
            for key in (COUNT, *MOMENTS)
        }
