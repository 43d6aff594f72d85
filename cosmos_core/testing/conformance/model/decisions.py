"""Tests of decisions: log-probs, entropies, divergences, features and gradients, whatever else is packed.

Shape legend: N decisions of a micro-batch, or of one payload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import pytest
import torch

from cosmos_core.protocols import MicroBatch
from cosmos_core.protocols.frozen import Divergence, KLTarget
from cosmos_core.testing.conformance.model.subject import Subject, expect_close, expect_each_close, skip_rest
from cosmos_core.testing.conformance.plugin import fault

_LEAST_SPREAD: Final = 0.25
"""Standard deviation of the log-probs, in nats: below it a model says much the same of everything."""
_BF16_ERROR: Final = 0.1
"""Mean difference, in nats, that computing in bfloat16 may make to a model of some layers."""
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


class DecisionTests:
    """Tests of `decide`."""

    def test_decisions_equal_the_reference(self, subject: Subject) -> None:
        """Ratios of the loss are between these numbers and the engine's; both must be the model's."""
        for temperature in subject.temperatures:
            expected = subject.reference(subject.model, subject.module, subject.payloads, temperature=temperature)
            with torch.no_grad():
                found = subject.each(temperature=temperature, with_entropy=True)
            where = f"at temperature {temperature:g} are not those of the reference"
            mine, theirs = ([each.logprobs_N for each in side] for side in (found, expected))
            expect_each_close(mine, theirs, f"log-probs {where}", subject.tolerance)
            given = [each.entropy_N for each in expected if each.entropy_N is not None]
            if len(given) == len(expected):
                entropies = [each.entropy_N for each in found if each.entropy_N is not None]
                expect_each_close(entropies, given, f"entropies {where}", subject.tolerance)
        if not (spread := float(torch.cat(subject.logprobs()).std())) >= _LEAST_SPREAD:
            fault(
                f"the log-probs of all decisions are nearly equal (standard deviation {spread:.2g}), so the kit could "
                "not see a mistake; test a model with larger weights, such as initializer_range = 0.2 in its config"
            )
        plain, asked = (subject.decide(subject.batch, with_entropy=with_entropy) for with_entropy in (False, True))
        entropy_N = asked.entropy_N
        if plain.entropy_N is not None or entropy_N is None:
            fault(
                "decide(with_entropy=False) gave an entropy, or decide(with_entropy=True) none; algorithms rely on it"
            )
        if entropy_N.shape != asked.logprobs_N.shape or entropy_N.requires_grad or entropy_N.dtype != torch.float32:
            fault("the entropy must be one for each decision, detached and float32: it is never part of the graph")
        if not torch.equal(plain.logprobs_N, asked.logprobs_N):
            fault("log-probs change when the entropy is asked for")
        skip_rest({"not given: the reference has no entropies": len(given) < len(expected)})

    def test_log_probs_do_not_depend_on_how_payloads_are_packed(self, subject: Subject) -> None:
        """Packed sequences never see one another, and nothing is drawn in a forward."""
        first, second = subject.logprobs(), subject.logprobs()
        if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
            fault("decide() gives other log-probs the second time; build() must leave no dropout on (module.eval())")
        with torch.no_grad():
            alone = [subject.decide(batch).logprobs_N for batch in subject.alone]
        for budget in subject.budgets:
            for step, order in ((1, "in their order"), (-1, "in reverse")):
                found = subject.logprobs(payloads=subject.payloads[::step], budget=budget)[::step]
                what = f"log-probs change with what else is packed ({order}, budget of {budget} units)"
                why = "sequences see one another, or decisions are not in the order of batch.sequences"
                expect_each_close(found, alone, f"{what}: {why}", subject.tolerance)

    def test_log_probs_are_float32_whatever_the_precision(self, subject: Subject) -> None:
        """A trainer computes in bfloat16 by autocast, a rollout replica holds bfloat16 weights."""
        exact_N = torch.cat(subject.logprobs())
        with torch.autocast("cpu", torch.bfloat16):
            trained_N = torch.cat(subject.logprobs())
        held_N = torch.cat(subject.logprobs(subject.build(dtype=torch.bfloat16)))
        for what, values_N in (("float32", exact_N), ("bfloat16 autocast", trained_N), ("bfloat16 weights", held_N)):
            if values_N.dtype != torch.float32 or not bool(values_N.isfinite().all()):
                fault(
                    f"with {what}, decide() gave log-probs of {values_N.dtype}; give finite torch.float32: {values_N}"
                )
            if bool((values_N.bfloat16().float() == values_N).all()):
                fault(
                    f"with {what} every log-prob is a bfloat16 number: they were rounded, by some 0.4% each; compute "
                    "the log-softmax in float32 and give what it gives"
                )
            if not (error := float((values_N - exact_N).abs().mean())) <= _BF16_ERROR:
                fault(
                    f"with {what} log-probs are off by {error:.2g} nats on average (allowed {_BF16_ERROR}); "
                    "compute norms and the log-softmax in float32"
                )

    def test_divergences_are_distances_that_their_gradient_shortens(self, subject: Subject) -> None:
        """Nothing from itself, something from another model, and of fewer outcomes never more."""
        if not subject.capabilities.divergences:
            pytest.skip("it declares no divergences")
        other, batch = subject.other_weights(), subject.batch
        for kind in sorted(subject.capabilities.divergences):
            all_, few = (Divergence(kind=kind, beta=0.3, top=top) for top in (None, 3))
            _check_unasked(subject, all_)
            apart = {}
            for each in (all_, few):
                own_N = _compared(subject, subject.module, batch, each).detach()
                apart[each] = apart_N = _compared(subject, other, batch, each).detach()
                if float(own_N.abs().max()) > 1e-4:
                    fault(f"{each}: a decision is {own_N.abs().max():.3g} away from the very same distribution")
                if float(apart_N.min()) < -1e-5:
                    fault(f"{each}: a decision is {apart_N.min():.3g} away from another distribution")
                if not float(apart_N.mean()) > 1e-3:
                    fault(f"{each}: decisions are {apart_N.mean():.3g} away from those of other weights")
                _check_shortened(subject, other, each)
                for index, part_N in zip(batch.sequences, torch.split(apart_N, list(batch.num_decisions)), strict=True):
                    alone_N = _compared(subject, other, subject.alone[index], each).detach()
                    what = f"the divergence of payload {index} changes with what else is packed"
                    expect_close(part_N, alone_N, what, rtol=1e-3)
            if bool((apart[few] > apart[all_] + 1e-4).any()):
                fault(f"{kind} with top = 3 is larger than with all outcomes told apart; take the others as one")

    def test_features_are_there_where_declared(self, subject: Subject) -> None:
        """One row a decision, with a gradient to the weights."""
        if not subject.capabilities.features:
            pytest.skip("it declares no features")
        plain, asked = (subject.decide(subject.batch, with_features=with_features) for with_features in (False, True))
        expected = (sum(subject.batch.num_decisions), subject.facts.hidden_size)
        features_ND = asked.features_ND
        if features_ND is None or tuple(features_ND.shape) != expected:
            found = features_ND if features_ND is None else tuple(features_ND.shape)
            fault(f"decide(with_features=True) gave features {found}; expected {expected} (decisions, hidden_size)")
        if not features_ND.requires_grad:
            fault("features carry no gradient, so a critic could not train the model's layers")
        if plain.features_ND is not None or not torch.equal(plain.logprobs_N, asked.logprobs_N):
            fault("features were given unasked, or log-probs change when they are asked for")

    def test_gradients_are_those_of_the_log_probs(self, subject: Subject) -> None:
        """A parameter moved along its gradient changes log-probs as it says; what has no gradient changes nothing."""
        # At 1 a forgotten division would not show.
        temperature = next((each for each in subject.temperatures if each != 1.0), 1.0)
        _backward(subject, temperature)
        parameters = dict(subject.module.named_parameters())
        if uncovered := [name for name, p in parameters.items() if p.requires_grad and p.grad is None]:
            fault(
                f"{len(uncovered)} parameters have no gradient, so no decision depends on them: "
                f"{', '.join(uncovered[:5])}; use them in decide(), drop them, or set requires_grad = False"
            )
        slope = _Slope(subject=subject, temperature=temperature)
        rounding = _ROUNDING * abs(slope.total())
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            furthest = _FURTHEST * (1.0 + float(parameter.detach().norm()))
            if length := float(gradient.norm()):
                step = min(_AIM / length, furthest)
                promised = step * length
                if (risen := slope.broken(parameter, gradient * (step / length), promised, rounding)) is not None:
                    fault(
                        f"the gradient of {name} is wrong: at temperature {temperature:g} it promises that the total "
                        f"log-prob changes by {promised:.3g}, and it changes by {risen:.3g}; look for detach(), "
                        "no_grad() or a scale between this parameter and the log-probs"
                    )
            if number := int((gradient == 0).sum()):
                aside = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0)) * (gradient == 0)
                aside *= furthest / float(aside.norm())
                if (risen := slope.broken(parameter, aside, 0.0, 5 * rounding + _STILL)) is not None:
                    fault(
                        f"the gradient of {name} is cut: it is 0 for {number} of {parameter.numel()} elements, and "
                        f"moving those changes the total log-prob by {risen:.3g}; look for a mask, a hook, detach() or "
                        "no_grad() on a part of this parameter"
                    )

    def test_gradients_depend_neither_on_packing_nor_on_precision(self, subject: Subject) -> None:
        """A step does not depend on how its batch was packed, and a trainer runs `decide` under bfloat16 autocast."""
        together, alone = _backward(subject), _backward(subject, batches=subject.alone)
        for name, gradient in alone.items():
            what = f"the gradient of {name} changes with how sequences are packed"
            expect_close(together[name], gradient, what, rtol=0, atol=1e-3 * max(float(gradient.abs().max()), 1.0))
        with torch.autocast("cpu", torch.bfloat16):
            found = _backward(subject)
        if missing := sorted(together.keys() - found.keys()):
            fault(f"under bfloat16 autocast {len(missing)} parameters have no gradient: {', '.join(missing[:5])}")
        error = _length({name: found[name] - gradient for name, gradient in together.items()})
        if not (part := error / max(_length(together), 1e-30)) <= _AUTOCAST_ERROR:
            fault(
                f"under bfloat16 autocast the gradient is off by {part:.0%} of its length (allowed "
                f"{_AUTOCAST_ERROR:.0%}); look for what decide() does otherwise where torch.is_autocast_enabled()"
            )


def _check_unasked(subject: Subject, divergence: Divergence) -> None:
    temperature = _temperature(subject.batch)
    plain = subject.decide(subject.batch, temperature=temperature)
    asked = subject.decide(subject.batch, temperature=temperature, prediction_for=divergence)
    if plain.prediction is not None or plain.divergence_N is not None or asked.divergence_N is not None:
        fault("decide() gave a prediction or a divergence that was not asked for")
    expect_close(
        asked.logprobs_N, plain.logprobs_N, "log-probs change when the prediction is asked for", rtol=1e-5, atol=1e-6
    )


def _compared(subject: Subject, other: torch.nn.Module, batch: MicroBatch, divergence: Divergence) -> torch.Tensor:
    """The divergence of each decision of the module from those of another."""
    temperature, number = _temperature(batch), sum(batch.num_decisions)
    with torch.no_grad():
        prediction = subject.decide(batch, other, temperature=temperature, prediction_for=divergence).prediction
    shapes = {name: tuple(array.shape) for name, array in (prediction or {}).items()}
    if not prediction or any(shape[:1] != (number,) for shape in shapes.values()):
        fault(f"decide(prediction_for={divergence}) gave {shapes} for {number} decisions; give a row for each")
    kl_target = KLTarget(prediction=prediction, comparison=divergence)
    found_N = subject.decide(batch, temperature=temperature, kl_target=kl_target).divergence_N
    is_good = found_N is not None and found_N.shape == (number,) and found_N.dtype == torch.float32
    if found_N is None or not is_good or not bool(found_N.isfinite().all()):
        fault(f"{divergence}: divergence_N is {found_N} for {number} decisions; give one finite float32 for each")
    return found_N


def _temperature(batch: MicroBatch) -> float:
    """One at which a forgotten division shows; of denoising steps, whose noise has none, 1."""
    return 1.0 if batch.spans else 0.7


def _check_shortened(subject: Subject, other: torch.nn.Module, divergence: Divergence) -> None:
    """That a small step against its gradient makes it smaller."""
    before_N = _compared(subject, other, subject.batch, divergence)
    if not before_N.requires_grad:
        fault(f"{divergence}: divergence_N carries no gradient, so nothing would be learnt from it")
    parameters = [parameter for parameter in subject.module.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(before_N.sum(), parameters, allow_unused=True)
    grads = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, found, strict=True)]
    before, norm = float(before_N.detach().sum()), sum(float(grad.square().sum()) for grad in grads)
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.sub_(grad * (1e-3 * before / max(norm, 1e-12)))
        after = float(_compared(subject, other, subject.batch, divergence).sum())
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
    if not after < before:
        fault(f"{divergence}: a small step against its gradient takes it from {before:.6g} to {after:.6g}")


@attrs.frozen(kw_only=True, eq=False)
class _Slope:
    """The total log-prob of the payloads, as a function of the parameters."""

    subject: Subject
    temperature: float

    def total(self) -> float:
        """With the parameters as they are, summed in float64."""
        subject = self.subject
        with torch.no_grad():
            found = [subject.decide(batch, temperature=self.temperature) for batch in subject.batches]
        return sum(float(decided.logprobs_N.double().sum()) for decided in found)

    def broken(
        self, parameter: torch.nn.Parameter, step: torch.Tensor, promised: float, allowed: float
    ) -> float | None:
        """By how much the total rises with a step, if neither it nor a shorter one does what is promised."""
        rises = []
        for part in (1.0, _SHORTER):
            with torch.no_grad():
                # Half of the way from minus to plus.
                kept, totals = parameter.detach().clone(), []
                for sign in (part, -part):
                    parameter.copy_(kept + sign * step)
                    totals.append(self.total())
                parameter.copy_(kept)
            rises.append((totals[0] - totals[1]) / 2.0)
            if abs(rises[-1] - part * promised) <= _ERROR * part * promised + allowed:
                return None
        return rises[0]


def _length(gradients: Mapping[str, torch.Tensor]) -> float:
    """Of all gradients together."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def _backward(
    subject: Subject, temperature: float = 1.0, batches: Sequence[MicroBatch] | None = None
) -> dict[str, torch.Tensor]:
    """Gradients of the log-probability of everything, left in the parameters too."""
    module = subject.module
    module.zero_grad()
    for batch in batches or subject.batches:
        total = subject.decide(batch, temperature=temperature, with_entropy=True).logprobs_N.sum()
        if not total.requires_grad:
            where = ", under bfloat16 autocast" if torch.is_autocast_enabled("cpu") else ""
            fault(
                f"log-probs carry no gradient (decided with_entropy=True{where}); decide() must not run under "
                "no_grad(), nor detach what it returns"
            )
        with torch.autocast("cpu", enabled=False):
            total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
