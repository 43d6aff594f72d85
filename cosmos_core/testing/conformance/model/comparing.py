"""What a model says besides log-probs: how far it is from a frozen model, and what it knows, for a critic.

Shape legend: N decisions of a micro-batch, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch

from cosmos_core.protocols import (
    Decided,
    Divergence,
    KLTarget,
    MicroBatch,
    Model,
    ModelCapabilities,
)
from cosmos_core.testing.conformance.model.evaluation import ROOM, pack_alone
from cosmos_core.testing.conformance.model.setting import CPU, SEED, ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_TEMPERATURE = 0.7


class ModelComparing(ModelSetting):
    """`decide` with `prediction_for`, `kl_target` and `with_features`, of a model that declares them."""

    @pytest.fixture
    def divergences(self, capabilities: ModelCapabilities) -> Sequence[Divergence]:
        """What the model can compute, each with all outcomes told apart, and with a few."""
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
        """What `Divergence.top` promises."""
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
        """Outlooks are of decisions, in the order of the micro-batch."""
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
