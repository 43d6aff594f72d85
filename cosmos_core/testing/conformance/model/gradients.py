"""Gradients: those of the log-probabilities, for every element of every parameter, however sequences are packed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import pytest
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
_STILL: Final = 1e-5
"""Change of the total log-prob, in nats, that is no change, on top of five times the rounding: the move is long."""
_AUTOCAST_ERROR: Final = 0.5
"""Distance between a gradient in bfloat16 and in float32, as a part of its length."""


class ModelGradients(ModelSetting):
    """The gradient that `decide` carries."""

    @pytest.fixture
    def temperature(self) -> float:
        """One at which a forgotten division shows."""
        return next((each for each in self.temperatures if each != 1.0), 1.0)

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
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float
    ) -> None:
        """Each parameter is moved a little along its gradient; the log-probs must rise by what the gradient says."""
        _backward(model, module, payloads, temperature)
        slope = _Slope(model=model, module=module, batches=model.pack(payloads, budget=ROOM), temperature=temperature)
        rounding = _ROUNDING * abs(slope.total())
        for name, parameter in module.named_parameters():
            if (move := _Move.along(parameter)) is None:
                continue
            risen = slope.broken(parameter, move, rounding)
            if risen is not None:
                fault(
                    f"the gradient of {name} is wrong: at temperature {temperature:g} it promises that the total "
                    f"log-prob changes by {move.predicted:.3g}, and it changes by {risen:.3g}; look for detach(), "
                    "no_grad() or a scale between this parameter and the log-probs"
                )

    def test_what_has_no_gradient_changes_nothing(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float
    ) -> None:
        """A gradient that is cut for some rows or columns leaves them as they were drawn, for ever."""
        _backward(model, module, payloads, temperature)
        slope = _Slope(model=model, module=module, batches=model.pack(payloads, budget=ROOM), temperature=temperature)
        allowed = 5 * _ROUNDING * abs(slope.total()) + _STILL
        for name, parameter in module.named_parameters():
            if (move := _Move.aside(parameter)) is None:
                continue
            risen = slope.broken(parameter, move, allowed)
            if risen is not None:
                still = int((move.step != 0).sum())
                fault(
                    f"the gradient of {name} is cut: it is 0 for {still} of {parameter.numel()} elements, and moving "
                    f"those changes the total log-prob by {risen:.3g}; look for a mask, a hook, detach() or no_grad() "
                    "on a part of this parameter"
                )

    def test_gradients_equal_those_of_each_sequence_alone(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float
    ) -> None:
        """What a step learns does not depend on how its batch was packed."""
        together = _backward(model, module, payloads, temperature)
        module.zero_grad()
        for payload in payloads:
            alone = model.decide(module, pack_alone(model, payload), temperature=temperature, with_entropy=True)
            alone.logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
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

    def test_gradients_under_autocast_are_nearly_the_same(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """A trainer runs `decide` under bfloat16 autocast unless the recipe asks for float32."""
        exact = _backward(model, module, payloads)
        with torch.autocast("cpu", torch.bfloat16):
            found = _backward(model, module, payloads)
        if missing := sorted(exact.keys() - found.keys()):
            fault(f"under bfloat16 autocast {len(missing)} parameters have no gradient: {', '.join(missing[:5])}")
        length = _length(exact)
        error = _length({name: found[name] - gradient for name, gradient in exact.items()}) / max(length, 1e-30)
        if not error <= _AUTOCAST_ERROR:
            fault(
                f"under bfloat16 autocast the gradient is off by {error:.0%} of its length (allowed "
                f"{_AUTOCAST_ERROR:.0%}); look for what decide() does otherwise where torch.is_autocast_enabled()"
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
    def along(cls, parameter: torch.nn.Parameter) -> _Move | None:
        """Along the gradient; None where it is zero, or not asked for."""
        if parameter.grad is None or not parameter.grad.any():
            return None
        slope = float(parameter.grad.norm())
        length = min(_AIM / slope, _furthest(parameter))
        return cls(step=parameter.grad * (length / slope), predicted=length * slope)

    @classmethod
    def aside(cls, parameter: torch.nn.Parameter) -> _Move | None:
        """Anywhere among the elements whose gradient is exactly 0; None where there are none."""
        if not parameter.requires_grad or (parameter.grad is not None and parameter.grad.all()):
            return None
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        if parameter.grad is not None:
            drawn = drawn * (parameter.grad == 0)
        return cls(step=drawn * (_furthest(parameter) / float(drawn.norm())), predicted=0.0)

    def shortened(self, part: float) -> _Move:
        """The same move, not as far."""
        return _Move(step=self.step * part, predicted=self.predicted * part)


@attrs.frozen(kw_only=True, eq=False)
class _Slope:
    """The total log-prob of some micro-batches, as a function of the parameters."""

    model: Model
    module: torch.nn.Module
    batches: Sequence[MicroBatch]
    temperature: float

    def total(self) -> float:
        """With the parameters as they are."""
        return total_logprob(self.model, self.module, self.batches, temperature=self.temperature)

    def broken(self, parameter: torch.nn.Parameter, move: _Move, allowed: float) -> float | None:
        """By how much the total rises with a move, if neither it nor a shorter one keeps what it predicts."""
        rises = []
        for each in (move, move.shortened(_SHORTER)):
            rises.append(self._rise(parameter, each))
            if abs(rises[-1] - each.predicted) <= _ERROR * each.predicted + allowed:
                return None
        return rises[0]

    def _rise(self, parameter: torch.nn.Parameter, move: _Move) -> float:
        """By how much the total rises with the move, as half of the way from minus to plus."""
        kept = parameter.detach().clone()
        totals = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                parameter.copy_(kept + sign * move.step)
            totals.append(self.total())
        with torch.no_grad():
            parameter.copy_(kept)
        return (totals[0] - totals[1]) / 2.0


def _furthest(parameter: torch.nn.Parameter) -> float:
    return _FURTHEST * (1.0 + float(parameter.detach().norm()))


def _length(gradients: Mapping[str, torch.Tensor]) -> float:
    """Of all gradients together."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def _backward(
    model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """Gradients of the log-probability of everything, left in the parameters too."""
    module.zero_grad()
    found = decide_each(model, module, payloads, temperature=temperature, with_entropy=True)
    total = torch.stack([each.logprobs_N.sum() for each in found]).sum()
    if not total.requires_grad:
        fault(
            "log-probs carry no gradient (decided with_entropy=True"
            f"{', under bfloat16 autocast' if torch.is_autocast_enabled('cpu') else ''}); decide() must not run under "
            "no_grad(), nor detach what it returns"
        )
    with torch.autocast("cpu", enabled=False):
        total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
