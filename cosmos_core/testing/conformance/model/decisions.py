"""Decisions: the log-probabilities are the model's own, whatever else is packed.

Shape legend: N decisions of a micro-batch, or of one payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import pytest
import torch

from cosmos_core.protocols import Decided, MicroBatch, Model, ModelCapabilities
from cosmos_core.protocols.frozen import Divergence, KLTarget
from cosmos_core.testing.conformance.model.subject import CPU, ROOM, SEED, ModelSetting, decide_each, pack_alone, splits
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_LEAST_SPREAD: Final = 0.25
"""Standard deviation of the log-probs, in nats: below it a model says much the same of everything."""
_BF16_ERROR: Final = 0.1
"""Mean difference, in nats, that computing in bfloat16 may make to a model of some layers."""


class ModelDecisions(ModelSetting):
    """`decide` against a reference, and against itself."""

    @pytest.fixture
    def alone(self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]) -> list[torch.Tensor]:
        """Log-probs of each payload in a micro-batch of its own."""
        with torch.no_grad():
            return [
                model.decide(module, pack_alone(model, payload), temperature=1.0).logprobs_N for payload in payloads
            ]

    def test_log_probs_equal_the_reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Ratios of the loss are between these numbers and the engine's; both must be the model's."""
        for temperature in self.temperatures:
            expected = [each.logprobs_N for each in self.reference(model, module, payloads, temperature=temperature)]
            with torch.no_grad():
                found = decide_each(model, module, payloads, temperature=temperature)
            self._compare(
                [each.logprobs_N for each in found],
                expected,
                f"log-probs at temperature {temperature:g} are not those of the reference",
            )

    def test_a_mistake_would_show_in_this_model(self, alone: list[torch.Tensor]) -> None:
        """A model that says much the same of everything would pass whatever its plugin did."""
        spread = float(torch.cat(alone).std())
        if not spread >= _LEAST_SPREAD:
            fault(
                f"the log-probs of all decisions are nearly equal (standard deviation {spread:.2g}), so the kit could "
                f"not see a mistake; test a model with larger weights, such as initializer_range = 0.2 in its config"
            )

    def test_log_probs_do_not_depend_on_what_else_is_packed(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], alone: list[torch.Tensor]
    ) -> None:
        """Packed sequences never see one another."""
        with torch.no_grad():
            together = [each.logprobs_N for each in decide_each(model, module, payloads)]
        self._compare(together, alone, "log-probs change with what else is packed: sequences see one another")

    def test_log_probs_do_not_depend_on_order_or_budget(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], alone: list[torch.Tensor]
    ) -> None:
        """`decide` answers in the order of `batch.sequences`, however the payloads were split."""
        longest = max(payloads, key=lambda payload: pack_alone(model, payload).num_units)
        size = pack_alone(model, longest).num_units
        halves = (size // 2,) if splits(model, longest) else ()
        for budget in (*halves, size + 1, ROOM):
            with torch.no_grad():
                found = decide_each(model, module, list(reversed(payloads)), budget=budget)
            self._compare(
                [each.logprobs_N for each in reversed(found)],
                alone,
                f"log-probs change with the order of the payloads (budget of {budget} units): "
                "give them in the order of batch.sequences",
            )

    def test_the_same_micro_batch_gives_the_same_bits(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Nothing is drawn in a forward; dropout would make log-probs incomparable."""
        with torch.no_grad():
            first, second = (decide_each(model, module, payloads) for _ in range(2))
        if any(not torch.equal(a.logprobs_N, b.logprobs_N) for a, b in zip(first, second, strict=True)):
            fault("decide() gives other log-probs the second time; build() must leave no dropout on (module.eval())")

    def test_log_probs_are_float32_whatever_the_precision(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """A trainer computes in bfloat16 by autocast, a rollout replica holds bfloat16 weights."""
        with torch.no_grad():
            exact = decide_each(model, module, payloads)
            with torch.autocast("cpu", torch.bfloat16):
                trained = decide_each(model, module, payloads)
            half = model.build(seed=SEED, dtype=torch.bfloat16, device=CPU)
            held = decide_each(model, half, payloads)
        for what, found in (("float32", exact), ("bfloat16 autocast", trained), ("bfloat16 weights", held)):
            _check_values(found, f"with {what}")
            values_N = _joined(found)
            if bool((values_N.bfloat16().float() == values_N).all()):
                fault(
                    f"with {what} every log-prob is a bfloat16 number: they were rounded, by some 0.4% each; compute "
                    "the log-softmax in float32 and give what it gives"
                )
            error = float((values_N - _joined(exact)).abs().mean())
            if not error <= _BF16_ERROR:
                fault(
                    f"with {what} log-probs are off by {error:.2g} nats on average (allowed {_BF16_ERROR}); "
                    "compute norms and the log-softmax in float32"
                )

    def test_the_entropy_is_given_where_asked_for(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """It costs a pass over the distribution, and only some algorithms use it."""
        batch = model.pack(payloads, budget=ROOM)[0]
        plain = model.decide(module, batch, temperature=1.0)
        asked = model.decide(module, batch, temperature=1.0, with_entropy=True)
        if plain.entropy_N is not None:
            fault("decide(with_entropy=False) gave an entropy; give None, algorithms rely on it")
        if asked.entropy_N is None or asked.entropy_N.shape != asked.logprobs_N.shape:
            shape = None if asked.entropy_N is None else tuple(asked.entropy_N.shape)
            fault(f"decide(with_entropy=True) gave entropies {shape} for {len(asked.logprobs_N)} decisions")
        if asked.entropy_N.requires_grad or asked.entropy_N.dtype != torch.float32:
            fault("the entropy must be detached and float32: it is a measure, and never part of the graph")
        if not torch.equal(plain.logprobs_N, asked.logprobs_N):
            fault("log-probs change when the entropy is asked for")

    def test_the_entropy_equals_the_reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Of the distribution that the decision was drawn from: after the temperature."""
        for temperature in self.temperatures:
            expected = [each.entropy_N for each in self.reference(model, module, payloads, temperature=temperature)]
            given = [entropy_N for entropy_N in expected if entropy_N is not None]
            if len(given) < len(expected):
                pytest.skip("not given: the reference has no entropies")
            with torch.no_grad():
                found = decide_each(model, module, payloads, temperature=temperature, with_entropy=True)
            entropies = [each.entropy_N for each in found if each.entropy_N is not None]
            self._compare(entropies, given, f"entropies at temperature {temperature:g} are not those of the reference")

    def _compare(self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
        """Fault with the payload and decision that is furthest off, if any is off by more than `tolerance`."""
        worst = (0.0, "")
        for index, (mine_N, theirs_N) in enumerate(zip(found, expected, strict=True)):
            if mine_N.shape != theirs_N.shape:
                fault(f"{what}: payload {index} has {len(mine_N)} decisions, expected {len(theirs_N)}")
            if not len(mine_N):
                continue
            # `not <=` and this place keep NaN from passing.
            excess_N = ((mine_N - theirs_N).abs() - self.tolerance * theirs_N.abs()).nan_to_num(nan=float("inf"))
            place = int(excess_N.argmax())
            if float(excess_N[place]) > max(self.tolerance, worst[0]):
                values = f"{float(mine_N[place]):.6g}, expected {float(theirs_N[place]):.6g}"
                worst = (float(excess_N[place]), f"payload {index}, decision {place}: {values}")
        if worst[1]:
            fault(f"{what}; {worst[1]} (tolerance {self.tolerance:g})")


def _check_values(found: Sequence[Decided], when: str) -> None:
    for index, each in enumerate(found):
        if each.logprobs_N.dtype != torch.float32:
            fault(f"{when}, decide() gave log-probs of {each.logprobs_N.dtype}; the loss needs torch.float32")
        if not bool(each.logprobs_N.isfinite().all()):
            fault(f"{when}, log-probs of payload {index} are not finite: {each.logprobs_N.tolist()}")


def _joined(found: Sequence[Decided]) -> torch.Tensor:
    return torch.cat([each.logprobs_N for each in found])


_TEMPERATURE = 0.7


class ModelComparing(ModelSetting):
    """`decide` with `prediction_for`, `kl_target` and `with_features`, of a model that declares them."""

    @pytest.fixture
    def divergences(self, capabilities: ModelCapabilities) -> Sequence[Divergence]:
        """Divergences that the model can compute, each with all outcomes told apart, and with a few."""
        if not capabilities.divergences:
            pytest.skip("it declares no divergences")
        kinds = sorted(capabilities.divergences)
        return [Divergence(kind=kind, beta=0.3, top=top) for kind in kinds for top in (None, 3)]

    @pytest.fixture
    def other(self, model: Model) -> torch.nn.Module:
        """A module of other weights."""
        return model.build(seed=SEED + 1, dtype=torch.float32, device=CPU)

    def test_divergences_are_distances(
        self,
        model: Model,
        module: torch.nn.Module,
        other: torch.nn.Module,
        payloads: Sequence[Payload],
        divergences: Sequence[Divergence],
    ) -> None:
        """None from itself, some from another model, and never less than nothing."""
        batch = model.pack(payloads, budget=ROOM)[0]
        for divergence in divergences:
            own, apart = (_compared(model, module, each, batch, divergence).detach() for each in (module, other))
            if float(own.abs().max()) > 1e-4:
                fault(f"{divergence}: a decision is {float(own.abs().max()):.3g} away from the very same distribution")
            if float(apart.min()) < -1e-5:
                fault(f"{divergence}: a decision is {float(apart.min()):.3g} away from another distribution")
            if not float(apart.mean()) > 1e-3:
                fault(f"{divergence}: decisions are {float(apart.mean()):.3g} away from those of other weights")

    def test_fewer_outcomes_told_apart_are_not_further_apart(
        self,
        model: Model,
        module: torch.nn.Module,
        other: torch.nn.Module,
        payloads: Sequence[Payload],
        divergences: Sequence[Divergence],
    ) -> None:
        """`Divergence.top` promises it."""
        batch = model.pack(payloads, budget=ROOM)[0]
        for kind in dict.fromkeys(divergence.kind for divergence in divergences):
            few, all_ = (
                _compared(model, module, other, batch, Divergence(kind=kind, beta=0.3, top=top)).detach()
                for top in (3, None)
            )
            if bool((few > all_ + 1e-4).any()):
                fault(f"{kind} with top = 3 is larger than with all outcomes told apart; take the others as one")

    def test_the_gradient_of_a_divergence_brings_distributions_together(
        self,
        model: Model,
        module: torch.nn.Module,
        other: torch.nn.Module,
        payloads: Sequence[Payload],
        divergences: Sequence[Divergence],
    ) -> None:
        """A small step against it makes it smaller, and its own prediction carries none."""
        batch = model.pack(payloads, budget=ROOM)[0]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for divergence in divergences:
            before = _compared(model, module, other, batch, divergence).sum()
            if not before.requires_grad:
                fault(f"{divergence}: divergence_N carries no gradient, so nothing would be learnt from it")
            grads = torch.autograd.grad(before, parameters, allow_unused=True)
            norm = sum(float(grad.square().sum()) for grad in grads if grad is not None)
            step = 1e-3 * float(before.detach()) / max(norm, 1e-12)
            with _moved(parameters, grads, step), torch.no_grad():
                after = float(_compared(model, module, other, batch, divergence).sum())
            if not after < float(before.detach()):
                fault(f"{divergence}: a small step against its gradient takes it from {before:.6g} to {after:.6g}")

    def test_what_is_asked_besides_changes_no_log_prob(
        self,
        model: Model,
        module: torch.nn.Module,
        payloads: Sequence[Payload],
        divergences: Sequence[Divergence],
    ) -> None:
        """And what was not asked for is not given."""
        batch = model.pack(payloads, budget=ROOM)[0]
        plain = model.decide(module, batch, temperature=_temperature(batch))
        asked = model.decide(module, batch, temperature=_temperature(batch), prediction_for=divergences[0])
        if not torch.allclose(plain.logprobs_N, asked.logprobs_N, atol=1e-6):
            fault("log-probs change when the prediction is asked for")
        if plain.prediction is not None or plain.divergence_N is not None or asked.divergence_N is not None:
            fault("decide() gave a prediction or a divergence that was not asked for")

    def test_divergences_do_not_depend_on_what_else_is_packed(
        self,
        model: Model,
        module: torch.nn.Module,
        other: torch.nn.Module,
        payloads: Sequence[Payload],
        divergences: Sequence[Divergence],
    ) -> None:
        """Predictions are of decisions, in the order of the micro-batch."""
        batch = model.pack(payloads, budget=ROOM)[0]
        sizes = list(batch.num_decisions)
        together = torch.split(_compared(model, module, other, batch, divergences[0]), sizes)
        for number, index in enumerate(batch.sequences):
            alone = _compared(model, module, other, pack_alone(model, payloads[index]), divergences[0])
            if not torch.allclose(alone, together[number], rtol=1e-3, atol=1e-4):
                fault(f"the divergence of payload {index} changes with what else is packed")

    def test_features_are_there_where_declared(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], capabilities: ModelCapabilities
    ) -> None:
        """One row a decision, with a gradient to the weights."""
        if not capabilities.features:
            pytest.skip("it declares no features")
        batch = model.pack(payloads, budget=ROOM)[0]
        plain = model.decide(module, batch, temperature=1.0)
        asked = model.decide(module, batch, temperature=1.0, with_features=True)
        expected = (sum(batch.num_decisions), model.facts().hidden_size)
        found = None if asked.features_ND is None else tuple(asked.features_ND.shape)
        if found != expected:
            fault(f"decide(with_features=True) gave features {found}; expected {expected} (decisions, hidden_size)")
        assert asked.features_ND is not None
        if not asked.features_ND.requires_grad:
            fault("features carry no gradient, so a critic could not train the model's layers")
        if plain.features_ND is not None or not torch.equal(plain.logprobs_N, asked.logprobs_N):
            fault("features were given unasked, or log-probs change when they are asked for")


def _compared(
    model: Model, module: torch.nn.Module, other: torch.nn.Module, batch: MicroBatch, divergence: Divergence
) -> torch.Tensor:
    """The divergence of each decision of one module from those of another."""
    with torch.no_grad():
        look = model.decide(other, batch, temperature=_temperature(batch), prediction_for=divergence)
    prediction = _expect_prediction(look, divergence)
    kl_target = KLTarget(prediction=prediction, comparison=divergence)
    decided = model.decide(module, batch, temperature=_temperature(batch), kl_target=kl_target)
    found, number = decided.divergence_N, len(decided.logprobs_N)
    if found is None or found.shape != (number,) or found.dtype != torch.float32 or not bool(found.isfinite().all()):
        shape = None if found is None else f"{found.dtype} {tuple(found.shape)}"
        fault(f"{divergence}: divergence_N is {shape} for {number} decisions; give one finite float32 for each")
    return found


def _temperature(batch: MicroBatch) -> float:
    """One at which a forgotten division shows; of denoising steps, whose noise has none, 1."""
    return 1.0 if batch.spans else _TEMPERATURE


def _expect_prediction(decided: Decided, divergence: Divergence) -> Mapping[str, torch.Tensor]:
    prediction, number = decided.prediction, len(decided.logprobs_N)
    if prediction is None or not prediction:
        fault(f"decide(prediction_for={divergence}) gave no prediction")
    for name, array in prediction.items():
        if array.shape[:1] != (number,):
            fault(f"the prediction's {name!r} has shape {tuple(array.shape)} for {number} decisions; one row for each")
    return prediction


@contextmanager
def _moved(parameters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], step: float) -> Iterator[None]:
    """With parameters after a step against their gradients."""
    pairs = [(parameter, grad) for parameter, grad in zip(parameters, grads, strict=True) if grad is not None]
    kept = [parameter.detach().clone() for parameter, _ in pairs]
    with torch.no_grad():
        for parameter, grad in pairs:
            parameter.sub_(step * grad)
    yield
    with torch.no_grad():
        for (parameter, _), before in zip(pairs, kept, strict=True):
            parameter.copy_(before)
