"""All gradients of a replica in one buffer: one all-reduce, one norm, one fill."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class GradientBuffer:
    """Owns the `.grad` of each trainable parameter as a view of one float32 buffer.

    Parameters that a batch does not touch have a gradient of zero, never None, so that a step on any share of a batch
    updates the same tensors.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        size = sum(parameter.numel() for parameter in self._parameters)
        device = self._parameters[0].device
        self.flat = torch.zeros(size, dtype=torch.float32, device=device)
        self._views = [
            part.view_as(parameter)
            for part, parameter in zip(
                torch.split(self.flat, [parameter.numel() for parameter in self._parameters]),
                self._parameters,
                strict=True,
            )
        ]
        self.zero()

    def zero(self) -> None:
        """Forget what was accumulated."""
        self.flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def norm(self) -> float:
        """The global L2 norm; not finite if any gradient is not."""
        return float(torch.linalg.vector_norm(self.flat))

    def clip(self, norm: float, limit: float) -> None:
        """Scale to at most `limit`, given the present norm; 0 does not clip."""
        if limit > 0.0 and norm > limit:
            self.flat.mul_(limit / (norm + 1e-6))
