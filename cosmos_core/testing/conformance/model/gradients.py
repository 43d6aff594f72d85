"""Gradients: those of the log-probabilities, for every parameter, however sequences are packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch

from cosmos_core.protocols import MicroBatch, Model
from cosmos_core.testing.conformance.model.evaluation import ROOM, decide_each, pack_alone, total_logprob
from cosmos_core.testing.conformance.model.setting import ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_AIM: Final = 0.01
"""Change of the total log-prob, in nats, for which a parameter is moved along its gradient: far below curvature."""
_SHORTER: Final = 0.125
"""Part of the move that is tried when the whole one fails: it may have crossed the boundary between two experts."""
_FURTHEST: Final = 0.01
"""Longest move, as a part of the parameter's own length plus one."""
_ERROR: Final = 0.02
"""Part by which a promise may be missed."""
_ROUNDING: Final = 2e-7
"""Part of the total log-prob that rounding in float32 may add."""


class ModelGradients(ModelSetting):
    """The gradient that `decide` carries."""

    def test_every_parameter_gets_a_gradient(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """A parameter that no decision depends on is published and stored for nothing, or was forgotten."""
        _backward(model, module, payloads)
        uncovered = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
        if uncovered:
            fault(
                f"{len(uncovered)} parameters have no gradient, so no decision depends on them: "
                f"{', '.join(uncovered[:5])}; use them in decide(), drop them, or set requires_grad = False"
            )

    def test_gradients_are_those_of_the_log_probs(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Each parameter is moved a little along its gradient; the log-probs must rise by what the gradient says."""
        _backward(model, module, payloads)
        batches = model.pack(payloads, budget=ROOM)
        rounding = _ROUNDING * abs(total_logprob(model, module, batches))
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            whole = _Move.along(parameter)
            for move in (whole, whole.shortened(_SHORTER)):
                risen = _rise(model, module, batches, parameter, move)
                if abs(risen - move.predicted) <= _ERROR * move.predicted + rounding:
                    break
            else:
                fault(
                    f"the gradient of {name} is wrong: it promises that the total log-prob changes by "
                    f"{move.predicted:.3g}, and it changes by {risen:.3g}; look for detach(), no_grad() or a scale "
                    "between this parameter and the log-probs"
                )

    def test_gradients_equal_those_of_each_sequence_alone(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """What a step learns does not depend on how its batch was packed."""
        together = _backward(model, module, payloads)
        module.zero_grad()
        for payload in payloads:
            model.decide(module, pack_alone(model, payload), temperature=1.0).logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters():
            if parameter.grad is None or name not in together:
                continue
            scale = float(parameter.grad.abs().max())
            error = float((together[name] - parameter.grad).abs().max())
            if not error <= 1e-3 * max(scale, 1.0):
                fault(
                    f"the gradient of {name} changes with how sequences are packed: by {error:.2g}, where the largest "
                    f"of each sequence alone is {scale:.2g}"
                )


@attrs.frozen(kw_only=True, eq=False)
class _Move:
    """A small step of one parameter.

    Attributes:
        step: What is added to the parameter.
        predicted: By how much its gradient says that the total log-prob rises.
    """

    step: torch.Tensor
    predicted: float

    @classmethod
    def along(cls, parameter: torch.nn.Parameter) -> _Move:
        furthest = _FURTHEST * (1.0 + float(parameter.detach().norm()))
        slope = 0.0 if parameter.grad is None else float(parameter.grad.norm())
        if parameter.grad is None or slope == 0.0:
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            return cls(step=drawn * (furthest / float(drawn.norm())), predicted=0.0)
        length = min(_AIM / slope, furthest)
        return cls(step=parameter.grad * (length / slope), predicted=length * slope)

    def shortened(self, part: float) -> _Move:
        """The same move, not as far."""
        return _Move(step=self.step * part, predicted=self.predicted * part)


def _rise(
    model: Model,
    module: torch.nn.Module,
    batches: Sequence[MicroBatch],
    parameter: torch.nn.Parameter,
    move: _Move,
) -> float:
    """By how much the total log-prob rises with the move, as half of the way from minus to plus."""
    kept = parameter.detach().clone()
    totals = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            parameter.copy_(kept + sign * move.step)
        totals.append(total_logprob(model, module, batches))
    with torch.no_grad():
        parameter.copy_(kept)
    return (totals[0] - totals[1]) / 2.0


def _backward(model: Model, module: torch.nn.Module, payloads: Sequence[Payload]) -> dict[str, torch.Tensor]:
    """Gradients of the log-probability of everything, left in the parameters too."""
    module.zero_grad()
    total = torch.stack([each.logprobs_N.sum() for each in decide_each(model, module, payloads)]).sum()
    if not total.requires_grad:
        fault("log-probs carry no gradient; decide() must not run under no_grad(), nor detach what it returns")
    total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
