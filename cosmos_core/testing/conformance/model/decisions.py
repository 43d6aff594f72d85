"""Tests of `decide`: log-probs, entropies and gradients, whatever else is packed, and what is declared besides.

Shape legend: N decisions of a micro-batch or of a payload, K shares of a blend, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.models.tokens import array_of
from cosmos_core.protocols import Decided, MicroBatch
from cosmos_core.protocols.frozen import Blend, Divergence, KLTarget
from cosmos_core.protocols.model import MoEModel
from cosmos_core.testing.conformance.model.subject import (
    Subject,
    expect_close,
    expect_each_close,
    skip_rest,
    split,
    tensor,
)
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Array, Payload
from cosmos_core.weights.shards import dtype_name

_AIM: Final = 0.01
"""Change of the total log-prob, in nats, for which a parameter is moved along its gradient: far below curvature."""
_BLEND: Final = Blend(shares=(0.0, 0.5, 1.0, 2.0))


class DecisionTests:
    """Tests of `decide`, and of a model that is a `MoEModel`."""

    def test_decisions_equal_the_reference(self, subject: Subject) -> None:
        """Ratios of the loss are between these numbers and the engine's; both must be the model's."""
        plain, asked = (subject.decide(subject.batches[0], with_entropy=asked) for asked in (False, True))
        entropy_N, is_compared, tolerance = asked.entropy_N, True, subject.kit.tolerance
        if plain.entropy_N is not None or entropy_N is None:
            fault("decide(with_entropy=False) gave an entropy, or decide(with_entropy=True) none")
        if entropy_N.shape != asked.logprobs_N.shape or entropy_N.requires_grad or entropy_N.dtype != torch.float32:
            fault("the entropy must be one for each decision, detached and float32: it is never part of the graph")
        if not torch.equal(plain.logprobs_N, asked.logprobs_N):
            fault("log-probs change when the entropy is asked for")
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

    def test_log_probs_do_not_depend_on_how_payloads_are_packed(self, subject: Subject) -> None:
        """Packed sequences never see one another, and nothing is drawn in a forward."""
        if not all(map(torch.equal, subject.logprobs(), subject.logprobs())):
            fault("decide() gives other log-probs the second time; build() must leave no dropout on (module.eval())")
        alone = subject.logprobs_alone()
        for budget in subject.budgets:
            for step, order in ((1, "in their order"), (-1, "in reverse")):
                found = subject.logprobs(payloads=subject.payloads[::step], budget=budget)[::step]
                what = f"log-probs change with what else is packed ({order}, budget of {budget} units)"
                why = "sequences see one another, or decisions are not in the order of batch.sequences"
                expect_each_close(found, alone, f"{what}: {why}", subject.kit.tolerance)

    def test_log_probs_are_float32_whatever_the_precision(self, subject: Subject) -> None:
        """A trainer computes in bfloat16 by autocast, a rollout replica holds bfloat16 weights."""
        exact_N = torch.cat(subject.logprobs())
        with torch.autocast("cpu", torch.bfloat16):
            trained_N = torch.cat(subject.logprobs())
        held_N = torch.cat(subject.logprobs(subject.build(dtype=torch.bfloat16)))
        for what, found_N in (("float32", exact_N), ("bfloat16 autocast", trained_N), ("bfloat16 weights", held_N)):
            if found_N.dtype != torch.float32 or not bool(found_N.isfinite().all()):
                fault(f"with {what}, decide() gave log-probs of {found_N.dtype}; give finite torch.float32: {found_N}")
            if bool((found_N.bfloat16().float() == found_N).all()):
                fault(f"with {what} every log-prob is a bfloat16 number; compute the log-softmax in float32")
            # What bfloat16 makes of a model of some layers.
            if not (error := float((found_N - exact_N).abs().mean())) <= 0.1:
                fault(f"with {what} log-probs are off by {error:.2g} nats on average; compute norms in float32")

    def test_gradients_are_those_of_the_log_probs(self, subject: Subject) -> None:
        """A parameter moved along its gradient changes log-probs as it says; what has no gradient changes nothing."""
        _backward(subject, subject.temperature)
        parameters = dict(subject.module.named_parameters())
        if uncovered := [name for name, p in parameters.items() if p.requires_grad and p.grad is None]:
            fault(f"{len(uncovered)} parameters have no gradient, so no decision uses them: {', '.join(uncovered[:5])}")
        rounding = 2e-7 * abs(_total(subject))  # in float32
        for name, parameter in parameters.items():
            if (gradient := parameter.grad) is None:
                continue
            furthest = 0.01 * (1.0 + float(parameter.detach().norm()))
            if length := float(gradient.norm()):
                step = gradient / length * min(_AIM / length, furthest)
                promised = min(_AIM, furthest * length)
                if (risen := _broken(subject, parameter, step, promised, rounding)) is not None:
                    fault(
                        f"the gradient of {name} is wrong: at temperature {subject.temperature:g} it promises that the "
                        f"total log-prob changes by {promised:.3g}, not {risen:.3g}; look for detach() or a scale"
                    )
            if number := int((gradient == 0).sum()):
                aside = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0)) * (gradient == 0)
                aside *= furthest / float(aside.norm())
                if (risen := _broken(subject, parameter, aside, 0.0, 5 * rounding + 1e-5)) is not None:
                    fault(
                        f"the gradient of {name} is cut: it is 0 for {number} of {parameter.numel()} elements, and "
                        f"moving those changes the total log-prob by {risen:.3g}; look for a mask, a hook or detach()"
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
        error = _length(found[name] - gradient for name, gradient in together.items())
        if not (part := error / max(_length(together.values()), 1e-30)) <= 0.5:
            fault(f"under bfloat16 autocast the gradient is off by {part:.0%} of its length, above 50%")

    def test_divergences_are_distances_that_their_gradient_shortens(self, subject: Subject) -> None:
        """Nothing from itself, something from another model, and of fewer outcomes never more."""
        if not subject.capabilities.divergences:
            pytest.skip("it declares no divergences")
        other, batch = subject.other_weights(), subject.batches[0]
        for kind in sorted(subject.capabilities.divergences):
            all_, few = (Divergence(kind=kind, beta=0.3, top=top) for top in (None, 3))
            _check_unasked(subject, all_)
            apart = {}
            for each in (all_, few):
                own_N = _divergence(subject, subject.module, batch, each).detach()
                apart[each] = apart_N = _divergence(subject, other, batch, each).detach()
                if float(own_N.abs().max()) > 1e-4:
                    fault(f"{each}: a decision is {own_N.abs().max():.3g} away from the very same distribution")
                if float(apart_N.min()) < -1e-5:
                    fault(f"{each}: a decision is {apart_N.min():.3g} away from another distribution")
                if not float(apart_N.mean()) > 1e-3:
                    fault(f"{each}: decisions are {apart_N.mean():.3g} away from those of other weights")
                _check_shortened(subject, other, each)
                for index, part_N in split(batch, apart_N).items():
                    alone_N = _divergence(subject, other, subject.alone[index], each)
                    what = f"the divergence of payload {index} changes with what else is packed"
                    expect_close(part_N, alone_N, what, rtol=1e-3)
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
        batch = subject.batches[0]
        squared_NK, absolute_NK = _blended(subject, other, batch)
        squares_N = torch.cat([tensor(regressions[index], "times") for index in batch.sequences]).square()
        for whose, column, module in (("its own", 2, subject.module), ("the other model's", 0, other)):
            alone = subject.logprobs_alone(module)
            what = (
                f"a blend with a share of {_BLEND.shares[column]:g} is off by what is not {whose} error of x_0, t² "
                "times the regression's, or changes with what else is packed"
            )
            alone_N = torch.cat([alone[index] for index in batch.sequences])
            expect_close(squared_NK[:, column], -squares_N * alone_N, what)
        # A square of what is linear in the share: three shares tell the fourth.
        none, half, all_, twice = squared_NK.unbind(1)
        bend = 2 * (all_ - 2 * half + none)
        what = "errors of blends are no square of what is linear in the share; blend predictions, not errors"
        expect_close(twice, none + 2 * (all_ - none - bend) + 4 * bend, what, rtol=1e-3, atol=1e-3)
        _check_blend_learnt(subject, squared_NK, absolute_NK)
        _check_unasked(subject, _BLEND)

    def test_features_are_there_where_declared(self, subject: Subject) -> None:
        """One row a decision, with a gradient to the weights."""
        if not subject.capabilities.features:
            pytest.skip("it declares no features")
        plain, asked = (subject.decide(subject.batches[0], with_features=asked) for asked in (False, True))
        expected, features_ND = (len(plain.logprobs_N), subject.facts.hidden_size), asked.features_ND
        if features_ND is None or tuple(features_ND.shape) != expected:
            found = features_ND if features_ND is None else tuple(features_ND.shape)
            fault(f"decide(with_features=True) gave features {found}; expected {expected} (decisions, hidden_size)")
        if not features_ND.requires_grad:
            fault("features carry no gradient, so a critic could not train the model's layers")
        if plain.features_ND is not None or not torch.equal(plain.logprobs_N, asked.logprobs_N):
            fault("features were given unasked, or log-probs change when they are asked for")

    def test_only_forwards_of_a_step_are_counted(self, subject: Subject) -> None:
        """The trainer zeroes the counters, sums them over processes, and acts on them after the optimizer."""
        why = "with these options the model counts nothing"
        counting: MoEModel = subject.optional(MoEModel, why, lambda model: model.counters(subject.module))
        if odd := [each.dtype for each in counting.counters(subject.module) if each.dtype != torch.float32]:
            fault(f"counters() gave {odd[0]}; give float32, in which they are summed over processes")
        seen = []
        for is_learned in (False, True, True):
            for counter in counting.counters(subject.module):
                counter.zero_()
            weighed = [
                attrs.evolve(each, weights_N=torch.ones(sum(each.num_decisions)) if is_learned else None)
                for each in subject.batches
            ]
            _backward(subject, batches=weighed)
            seen.append([counter.clone() for counter in counting.counters(subject.module)])
        if not all(map(torch.equal, seen[1], seen[2])):
            fault("the same forwards count something else after counters() were zeroed; give the tensors, never copies")
        if any(bool(counter.any()) for counter in seen[0]):
            fault("a forward without weights_N is counted: nothing is learned from it")
        trained = {name: each for name, each in subject.module.named_parameters() if each.grad is not None}
        before = {name: each.detach().clone() for name, each in trained.items()}
        for name, value in counting.after_step(subject.module).items():
            if not math.isfinite(value):
                fault(f"after_step() reports {name} = {value}; give finite numbers")
        if moved := [name for name, each in trained.items() if not torch.equal(each, before[name])]:
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
                again_N = subject.decide(subject.pack_alone(_with_records(payload, rows))).logprobs_N
            what = "with its own records, under the same weights, log-probs differ"
            expect_close(again_N, free_N, what, rtol=0, atol=subject.kit.tolerance)


def _with_records(payload: Payload, recorded: Mapping[str, torch.Tensor]) -> Payload:
    arrays = {"logprobs": array_of(np.zeros(payload.arrays["completion"].shape, np.float32))}
    for name, rows in recorded.items():
        data = rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        arrays[name] = Array(dtype=dtype_name(rows.dtype), shape=tuple(rows.shape), data=data)
    return attrs.evolve(payload, arrays={**payload.arrays, **arrays})


def _compared(subject: Subject, other: torch.nn.Module, batch: MicroBatch, comparison: Divergence | Blend) -> Decided:
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
    found_N, number = _compared(subject, other, batch, divergence).divergence_N, sum(batch.num_decisions)
    is_good = found_N is not None and found_N.shape == (number,) and found_N.dtype == torch.float32
    if found_N is None or not is_good or not bool(found_N.isfinite().all()):
        fault(f"{divergence}: divergence_N is {found_N} for {number} decisions; give one finite float32 for each")
    return found_N


def _blended(subject: Subject, other: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared and absolute errors [N, K] of blends with another module."""
    if (blended := _compared(subject, other, batch, _BLEND).blended) is None:
        fault(f"decide(kl_target={_BLEND}) gave no blends")
    expected, both = (sum(batch.num_decisions), len(_BLEND.shares)), (blended.squared_NK, blended.absolute_NK)
    for name, found_NK in zip(("squared_NK", "absolute_NK"), both, strict=True):
        if found_NK.shape != expected or found_NK.dtype != torch.float32 or not bool(found_NK.isfinite().all()):
            fault(f"{name} is {found_NK.dtype} {tuple(found_NK.shape)}; give finite float32 {expected}")
    return both


def _check_unasked(subject: Subject, comparison: Divergence | Blend) -> None:
    plain, asked = (
        subject.decide(subject.batches[0], temperature=subject.temperature, prediction_for=each)
        for each in (None, comparison)
    )
    if (
        any(each is not None for told in (plain, asked) for each in (told.divergence_N, told.blended))
        or plain.prediction
    ):
        fault("decide() gave a prediction, a divergence or blends that were not asked for")
    what = "log-probs change when the prediction is asked for"
    expect_close(asked.logprobs_N, plain.logprobs_N, what, rtol=1e-5, atol=1e-6)


def _check_shortened(subject: Subject, other: torch.nn.Module, divergence: Divergence) -> None:
    """A small step against the gradient of a divergence makes it smaller."""
    batch = subject.batches[0]
    before_N = _divergence(subject, other, batch, divergence)
    if not before_N.requires_grad:
        fault(f"{divergence}: divergence_N carries no gradient, so nothing would be learnt from it")
    before, (parameters, grads) = float(before_N.detach().sum()), _gradients(subject, before_N.sum())
    step = -1e-3 * before / max(_length(grads) ** 2, 1e-12)
    with _moved(parameters, [step * grad for grad in grads]):
        after = float(_divergence(subject, other, batch, divergence).sum())
    if not after < before:
        fault(f"{divergence}: a small step against its gradient takes it from {before:.6g} to {after:.6g}")


def _check_blend_learnt(subject: Subject, squared_NK: torch.Tensor, absolute_NK: torch.Tensor) -> None:
    """Squared errors carry the gradient of the policy's part, and absolute ones, that measure them, none."""
    if not squared_NK.requires_grad:
        fault("squared errors of blends carry no gradient, so nothing would be learnt from them")
    if absolute_NK.requires_grad:
        fault("absolute errors of blends carry a gradient; detach them")
    if bool((absolute_NK.square() > squared_NK.detach() * (1 + 1e-3) + 1e-5).any()):
        fault("a mean absolute error of a blend is larger than the root of the mean squared one")
    none, all_ = (_length(_gradients(subject, squared_NK[:, column].sum())[1]) for column in (0, 2))
    if none or not all_ > 0:
        fault(f"the gradient of a blend with none of the policy has length {none:.3g}, and with all of it {all_:.3g}")


def _gradients(subject: Subject, total: torch.Tensor) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """The parameters that are trained, and the gradient of each; zero where there is none."""
    parameters = [parameter for parameter in subject.module.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
    return parameters, [
        torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, found, strict=True)
    ]


def _length(gradients: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


@contextmanager
def _moved(parameters: Sequence[torch.nn.Parameter], steps: Sequence[torch.Tensor]) -> Iterator[None]:
    """Without gradients, and with parameters that are some steps away for as long as it lasts."""
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, step in zip(parameters, steps, strict=True):
            parameter.add_(step)
        yield
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)


@torch.no_grad()
def _total(subject: Subject) -> float:
    decided = (subject.decide(batch, temperature=subject.temperature) for batch in subject.batches)
    return sum(float(each.logprobs_N.double().sum()) for each in decided)


def _broken(
    subject: Subject, parameter: torch.nn.Parameter, step: torch.Tensor, promised: float, allowed: float
) -> float | None:
    """By how much the total rises with a step, if neither it nor a shorter one does what is promised."""
    rises = []
    # The whole step may cross the boundary between two experts.
    for part in (1.0, 0.125):
        totals = []
        for sign in (part, -part):
            with _moved([parameter], [sign * step]):
                totals.append(_total(subject))
        # Half of the way from minus to plus.
        rises.append((totals[0] - totals[1]) / 2.0)
        if abs(rises[-1] - part * promised) <= 0.02 * part * promised + allowed:
            return None
    return rises[0]


def _backward(
    subject: Subject, temperature: float = 1.0, batches: Sequence[MicroBatch] | None = None
) -> dict[str, torch.Tensor]:
    """Gradients of the log-probability of everything, left in the parameters too."""
    subject.module.zero_grad()
    for batch in batches or subject.batches:
        total = subject.decide(batch, temperature=temperature, with_entropy=True).logprobs_N.sum()
        if not total.requires_grad:
            where = ", under bfloat16 autocast" if torch.is_autocast_enabled("cpu") else ""
            fault(f"log-probs carry no gradient (decided with_entropy=True{where}); look for no_grad() and detach()")
        with torch.autocast("cpu", enabled=False):
            total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in subject.module.named_parameters() if p.grad is not None}
