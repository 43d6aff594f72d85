"""Tests of `decide`: log-probs, entropies and gradients, whatever else is packed, and what is declared besides.

Shape legend: N decisions of a micro-batch or of a payload, K shares of a blend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import pytest
import torch

from cosmos_core.models.diffusion.arrays import with_tensors
from cosmos_core.protocols import Decided, MicroBatch
from cosmos_core.protocols.frozen import Blend, Comparison, Divergence, KLTarget
from cosmos_core.protocols.model import MoEModel
from cosmos_core.testing.conformance.model.subject import (
    Subject,
    copied,
    expect_close,
    expect_each_close,
    expect_tensor,
    skip_rest,
    tensor_of,
)
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.weights.shards import canonical_tensors, dtype_name

_AIM: Final = 0.01
"""Change of the total log-prob, in nats, for which a parameter is moved along its gradient: far below curvature."""
_BLEND: Final = Blend(shares=(0.0, 0.5, 1.0, 2.0))


class DecisionTests:
    """Tests of `decide`, and of a model that is a `MoEModel`."""

    def test_decisions_equal_the_reference(self, subject: Subject) -> None:
        """Ratios of the loss are between these numbers and the engine's; both must be the model's."""
        is_compared, tolerance = True, subject.kit.tolerance
        for temperature in subject.kit.temperatures:
            expected = subject.kit.reference(subject.model, subject.module, subject.payloads, temperature=temperature)
            where = f"at temperature {temperature:g} are not those of the reference"
            mine, theirs = subject.logprobs(temperature=temperature), [each.logprobs_N for each in expected]
            expect_each_close(mine, theirs, f"log-probs {where}", tolerance)
            given = [each.entropy_N for each in expected if each.entropy_N is not None]
            is_compared = is_compared and len(given) == len(expected)
            if is_compared:
                mine = subject.logprobs(name="entropy_N", temperature=temperature, with_entropy=True)
                expect_each_close(mine, given, f"entropies {where}", tolerance)
        # Below a quarter of a nat, a model says much the same of everything.
        if not (spread := float(torch.cat(subject.logprobs()).std())) >= 0.25:
            fault(f"log-probs all within {spread:.2g} nats show no mistake; set initializer_range = 0.2 in its config")
        skip_rest({"not given: the reference has no entropies": not is_compared})

    def test_what_is_asked_for_is_given_and_nothing_else(self, subject: Subject) -> None:
        """Entropies, features and predictions take memory, and log-probs are the same beside them."""
        batch, declared, number = subject.batches[0], subject.capabilities, sum(subject.batches[0].num_decisions)
        # An entropy is never part of the graph; from features, a critic trains the model's layers.
        asked: list[tuple[dict[str, Any], str, tuple[int, ...], bool]] = [
            ({}, "logprobs_N", (number,), True),
            ({"with_entropy": True}, "entropy_N", (number,), False),
        ]
        if declared.features:
            asked.append(({"with_features": True}, "features_ND", (number, subject.facts.hidden_size), True))
        comparisons: list[Comparison] = [Divergence(kind=kind, beta=0.3) for kind in sorted(declared.divergences)]
        comparisons += [_BLEND] if declared.blends else []
        asked += [({"prediction_for": each}, "prediction", (), False) for each in comparisons]
        plain_N = subject.decide(batch).logprobs_N
        for how, name, shape, has_gradient in asked:
            decided = subject.decide(batch, **how)
            given = {field for field, held in attrs.asdict(decided, recurse=False).items() if held is not None}
            if given != {"logprobs_N", name}:
                fault(f"decide({how}) gave {', '.join(sorted(given))}; give log-probs and what is asked for, no more")
            if name != "prediction":
                what = f"{name} of decide({how})"
                expect_tensor(what, getattr(decided, name), shape, has_gradient=has_gradient)
            expect_close(decided.logprobs_N, plain_N, f"log-probs change with decide({how})", rtol=1e-5, atol=1e-6)

    def test_log_probs_do_not_depend_on_how_payloads_are_packed(self, subject: Subject) -> None:
        """Packed sequences never see one another, and nothing is drawn in a forward."""
        if not all(map(torch.equal, subject.logprobs(), subject.logprobs())):
            fault("decide() gives other log-probs the second time; build() must leave no dropout on (module.eval())")
        alone = subject.logprobs_alone()
        for budget in subject.budgets:
            for step, order in ((1, "in their order"), (-1, "in reverse")):
                batches = subject.model.pack(subject.payloads[::step], budget=budget)
                what = f"log-probs change with what else is packed ({order}, budget of {budget} units)"
                why = "sequences see one another, or decisions are not in the order of batch.sequences"
                found = subject.logprobs(batches=batches)[::step]
                expect_each_close(found, alone, f"{what}: {why}", subject.kit.tolerance)

    def test_log_probs_are_float32_whatever_the_precision(self, subject: Subject) -> None:
        """A trainer computes in bfloat16 by autocast, a rollout replica holds bfloat16 weights."""
        exact_N = torch.cat(subject.logprobs())
        with torch.autocast("cpu", torch.bfloat16):
            trained_N = torch.cat(subject.logprobs())
        held_N = torch.cat(subject.logprobs(subject.build(dtype=torch.bfloat16)))
        for what, found_N in (("float32", exact_N), ("bfloat16 autocast", trained_N), ("bfloat16 weights", held_N)):
            if bool((found_N.bfloat16().float() == found_N).all()):
                fault(f"with {what} every log-prob is a bfloat16 number; compute the log-softmax in float32")
            # What bfloat16 makes of a model of some layers.
            if not (error := float((found_N - exact_N).abs().mean())) <= 0.1:
                fault(f"with {what} log-probs are off by {error:.2g} nats on average; compute norms in float32")

    def test_gradients_are_those_of_the_log_probs(self, subject: Subject) -> None:
        """A parameter moved along its gradient changes log-probs as it says; what has no gradient changes nothing."""
        gradients, parameters = _backward(subject, subject.temperature), dict(subject.module.named_parameters())
        if uncovered := [name for name, p in parameters.items() if p.requires_grad and name not in gradients]:
            fault(f"{len(uncovered)} parameters have no gradient, so no decision uses them: {', '.join(uncovered[:5])}")
        rounding = 2e-7 * abs(_total(subject))  # in float32
        for name, gradient in gradients.items():
            furthest, length = 0.01 * (1.0 + float(parameters[name].detach().norm())), float(gradient.norm())
            aside = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0)) * (gradient == 0)
            step = aside * (furthest / max(float(aside.norm()), 1e-12))
            step += gradient * min(_AIM / max(length, 1e-12) ** 2, furthest / max(length, 1e-12))
            promised = float((gradient * step).sum())
            noise = 5 * rounding + 1e-5 if bool(aside.any()) else rounding
            if (risen := _broken(subject, name, step, promised, noise)) is not None:
                fault(
                    f"the gradient of {name}, 0 for {int((gradient == 0).sum())} of {gradient.numel()} elements, is "
                    f"wrong: at temperature {subject.temperature:g} it promises that the total log-prob changes by "
                    f"{promised:.3g}, not {risen:.3g}; look for a scale, a mask, a hook or detach()"
                )

    def test_gradients_do_not_depend_on_precision(self, subject: Subject) -> None:
        """A trainer runs `decide` under bfloat16 autocast."""
        exact = _backward(subject)
        with torch.autocast("cpu", torch.bfloat16):
            found = _backward(subject)
        if missing := sorted(exact.keys() - found.keys()):
            fault(f"under bfloat16 autocast {len(missing)} parameters have no gradient: {', '.join(missing[:5])}")
        error = _length(found[name] - gradient for name, gradient in exact.items())
        if not (part := error / max(_length(exact.values()), 1e-30)) <= 0.5:
            fault(f"under bfloat16 autocast the gradient is off by {part:.0%} of its length, above 50%")

    def test_divergences_are_distances_that_their_gradient_shortens(self, subject: Subject) -> None:
        """The divergence is 0 from the model itself, above 0 from another, and over fewer outcomes never more."""
        if not subject.capabilities.divergences:
            pytest.skip("it declares no divergences")
        other, batch = subject.other_weights(), subject.batches[0]
        for kind in sorted(subject.capabilities.divergences):
            all_, few = (Divergence(kind=kind, beta=0.3, top=top) for top in (None, 3))
            apart = {}
            for each in (all_, few):
                own_N = _divergence(subject, subject.module, batch, each).detach()
                apart[each] = apart_N = _divergence(subject, other, batch, each).detach()
                if float(own_N.abs().max()) > 1e-4:
                    fault(f"{each}: a decision is {own_N.abs().max():.3g} away from the very same distribution")
                if not (float(apart_N.min()) >= -1e-5 and float(apart_N.mean()) > 1e-3):
                    told = f"{apart_N.mean():.3g} away from those of other weights, {apart_N.min():.3g} at least"
                    fault(f"{each}: decisions are {told}; give a distance")
                _check_shortened(subject, other, each)
                parts = [_divergence(subject, other, subject.alone[index], each) for index in batch.sequences]
                what = f"{each}: the divergence of a decision changes with what else is packed"
                expect_close(apart_N, torch.cat(parts), what, rtol=1e-3)
            if bool((apart[few] > apart[all_] + 1e-4).any()):
                fault(f"{kind} with top = 3 is larger than with all outcomes told apart; take the others as one")

    def test_blends_lie_between_both_models(self, subject: Subject) -> None:
        """With all of the policy its own error, with none the other's: of x_0, t times that of the velocity."""
        if not subject.capabilities.blends:
            pytest.skip("it declares no blends")
        regressions = [payload for payload in subject.payloads if "noise_seed" in payload.arrays]
        if not regressions:
            fault("blends are declared, and no payload of the kit has regressions; add one to the fixture `payloads`")
        subject, other = attrs.evolve(subject, payloads=regressions), subject.other_weights()
        squared_NK, absolute_NK = _blended(subject, other, subject.batches[0])
        squares = [tensor_of(payload, "times").square() for payload in regressions]
        for whose, column, module in (("its own", 2, subject.module), ("the other model's", 0, other)):
            alone = subject.logprobs_alone(module)
            what = (
                f"a blend with a share of {_BLEND.shares[column]:g} is off by what is not {whose} error of x_0, t² "
                "times the regression's, or changes with what else is packed"
            )
            expected_N = torch.cat([-squares[index] * alone[index] for index in subject.batches[0].sequences])
            expect_close(squared_NK[:, column], expected_N, what)
        # A square of what is linear in the share: three shares tell the fourth.
        none, half, all_, twice = squared_NK.unbind(1)
        bend = 2 * (all_ - 2 * half + none)
        what = "errors of blends are no square of what is linear in the share; blend predictions, not errors"
        expect_close(twice, none + 2 * (all_ - none - bend) + 4 * bend, what, rtol=1e-3, atol=1e-3)
        if bool((absolute_NK.square() > squared_NK.detach() * (1 + 1e-3) + 1e-5).any()):
            fault("a mean absolute error of a blend is larger than the root of the mean squared one")
        of_none, of_all = (_length(_gradients(subject, [each.sum()]).values()) for each in (none, all_))
        if of_none or not of_all > 0:
            fault(f"the gradient of a blend with none of the policy has length {of_none:.3g}, with all {of_all:.3g}")

    def test_only_forwards_of_a_step_are_counted(self, subject: Subject) -> None:
        """The trainer zeroes the counters, sums them over processes, and acts on them after the optimizer."""
        why = "with these options the model counts nothing"
        counting: MoEModel = subject.optional(MoEModel, why, lambda model: model.counters(subject.module))
        seen, trained = [], {}
        for is_learned in (False, True, True):
            for counter in counting.counters(subject.module):
                expect_tensor("one of counters()", counter, counter.shape)
                counter.zero_()
            weights = [torch.ones(sum(each.num_decisions)) if is_learned else None for each in subject.batches]
            batches = [attrs.evolve(each, weights_N=own) for each, own in zip(subject.batches, weights, strict=True)]
            trained = _backward(subject, batches=batches)
            seen.append([counter.clone() for counter in counting.counters(subject.module)])
        if not all(map(torch.equal, seen[1], seen[2])):
            fault("the same forwards count something else after counters() were zeroed; give the tensors, never copies")
        if any(bool(counter.any()) for counter in seen[0]):
            fault("a forward without weights_N is counted: nothing is learned from it")
        before = copied(subject.module)
        if odd := {name: each for name, each in counting.after_step(subject.module).items() if not math.isfinite(each)}:
            fault(f"after_step() reports {odd}; give finite numbers")
        after = canonical_tensors(subject.module)
        if moved := [name for name in trained if not torch.equal(after[name], before[name])]:
            fault(f"after_step() changed {moved[0]}, which has a gradient; leave it to the optimizer")

    def test_training_on_its_own_records_changes_nothing(self, subject: Subject) -> None:
        """With equal weights what was recorded, a row for each unit, is what would have been done."""
        why = "with these options the model records nothing"
        recording: MoEModel = subject.optional(MoEModel, why, lambda model: model.records())
        newest = recording.record(subject.module)
        for payload, batch in zip(subject.payloads, subject.alone, strict=True):
            with torch.no_grad():
                free_N, rows = subject.decide(batch).logprobs_N, dict(newest())
                found = {name: (dtype_name(each.dtype), tuple(each.shape)) for name, each in rows.items()}
                wanted = {each.name: (each.dtype, (batch.num_units, *each.shape)) for each in recording.records()}
                if found != wanted:
                    fault(f"a forward of {batch.num_units} units recorded {found}; records() declares {wanted}")
                made = with_tensors(payload, {"logprobs": torch.zeros(payload.arrays["completion"].shape), **rows})
                again_N = subject.decide(subject.pack_alone(made)).logprobs_N
            what = "with its own records, under the same weights, log-probs differ"
            expect_close(again_N, free_N, what, rtol=0, atol=subject.kit.tolerance)


def _compared(subject: Subject, other: torch.nn.Module, batch: MicroBatch, comparison: Comparison) -> Decided:
    """The decisions of the module, compared with those of another."""
    temperature, number = subject.temperature, sum(batch.num_decisions)
    with torch.no_grad():
        prediction = subject.decide(batch, other, temperature=temperature, prediction_for=comparison).prediction
    shapes = {name: tuple(array.shape) for name, array in (prediction or {}).items()}
    if not prediction or any(shape[:1] != (number,) for shape in shapes.values()):
        fault(f"decide(prediction_for={comparison}) gave {shapes} for {number} decisions; give a row for each")
    return subject.decide(
        batch, temperature=temperature, kl_target=KLTarget(prediction=prediction, comparison=comparison)
    )


def _divergence(subject: Subject, other: torch.nn.Module, batch: MicroBatch, divergence: Divergence) -> torch.Tensor:
    found_N, shape = _compared(subject, other, batch, divergence).divergence_N, (sum(batch.num_decisions),)
    return expect_tensor(f"divergence_N of {divergence}", found_N, shape, has_gradient=True)


def _blended(subject: Subject, other: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared errors [N, K] of blends with another module, and absolute ones, that measure them."""
    if (blended := _compared(subject, other, batch, _BLEND).blended) is None:
        fault(f"decide(kl_target={_BLEND}) gave no blends")
    shape = sum(batch.num_decisions), len(_BLEND.shares)
    return (
        expect_tensor("squared_NK of blends", blended.squared_NK, shape, has_gradient=True),
        expect_tensor("absolute_NK of blends", blended.absolute_NK, shape, has_gradient=False),
    )


def _check_shortened(subject: Subject, other: torch.nn.Module, divergence: Divergence) -> None:
    """A small step against the gradient of a divergence makes it smaller."""
    before = _divergence(subject, other, subject.batches[0], divergence).sum()
    gradients = _gradients(subject, [before])
    step = -1e-3 * float(before.detach()) / max(_length(gradients.values()) ** 2, 1e-12)
    with _moved(subject, {name: step * gradient for name, gradient in gradients.items()}):
        after = _divergence(subject, other, subject.batches[0], divergence).sum()
    if not after < before:
        fault(f"{divergence}: a small step against its gradient takes it from {before:.6g} to {after:.6g}")


def _gradients(subject: Subject, totals: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient of a sum, of the parameters that have one."""
    subject.module.zero_grad()
    for total in totals:
        with torch.autocast("cpu", enabled=False):
            total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in subject.module.named_parameters() if p.grad is not None}


def _backward(
    subject: Subject, temperature: float = 1.0, batches: Sequence[MicroBatch] | None = None
) -> dict[str, torch.Tensor]:
    """The gradient of the log-probability of everything, with two payloads alone besides."""
    batches = [*subject.batches, *subject.alone[:2]] if batches is None else batches
    decided = (subject.decide(each, temperature=temperature, with_entropy=True) for each in batches)
    return _gradients(subject, (each.logprobs_N.sum() for each in decided))


def _length(gradients: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


@contextmanager
def _moved(subject: Subject, steps: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Without gradients, and with parameters that are some steps away for as long as it lasts."""
    parameters = dict(subject.module.named_parameters())
    kept = {name: parameters[name].detach().clone() for name in steps}
    with torch.no_grad():
        for name, step in steps.items():
            parameters[name].add_(step)
        yield
        for name, old in kept.items():
            parameters[name].copy_(old)


@torch.no_grad()
def _total(subject: Subject) -> float:
    batches, temperature = [*subject.batches, *subject.alone[:2]], subject.temperature
    return sum(float(subject.decide(each, temperature=temperature).logprobs_N.double().sum()) for each in batches)


def _broken(subject: Subject, name: str, step: torch.Tensor, promised: float, allowed: float) -> float | None:
    """By how much the total rises with a step, if neither it nor a shorter one does what is promised."""
    rises = []
    # The whole step may cross the boundary between two experts.
    for part in (1.0, 0.125):
        totals = []
        for signed in (part, -part):
            with _moved(subject, {name: signed * step}):
                totals.append(_total(subject))
        # Half of the way from minus to plus.
        rises.append((totals[0] - totals[1]) / 2.0)
        if abs(rises[-1] - part * promised) <= 0.02 * part * promised + allowed:
            return None
    return rises[0]
