"""Blends of a model's predictions with another's, where its decisions are regressions (`ModelCapabilities.blends`).

Shape legend: N decisions of a micro-batch, K blends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch

from cosmos_core.protocols import Blend, Blended, Decided, KLTarget, MicroBatch, Model, ModelCapabilities
from cosmos_core.testing.conformance.model import latents
from cosmos_core.testing.conformance.model.evaluation import ROOM, pack_alone
from cosmos_core.testing.conformance.model.setting import CPU, SEED, ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_BLEND: Final = Blend(shares=(0.0, 0.5, 1.0, 2.0))
_ERROR: Final = 1e-4


class ModelBlending(ModelSetting):
    """`decide` with a `Blend` in `prediction_for` and `kl_target`."""

    @pytest.fixture
    def regressions(self, payloads: Sequence[Payload], capabilities: ModelCapabilities) -> Sequence[Payload]:
        """Payloads whose decisions can be blended."""
        if not capabilities.blends:
            pytest.skip("it declares no blends")
        found = [payload for payload in payloads if "noise_seed" in payload.arrays]
        if not found:
            fault("blends are declared, and no payload of the kit has regressions; add one to the fixture `payloads`")
        return found

    @pytest.fixture
    def neighbour(self, model: Model) -> torch.nn.Module:
        """A module of other weights."""
        return model.build(seed=SEED + 1, dtype=torch.float32, device=CPU)

    def test_blends_lie_between_both_models(
        self, model: Model, module: torch.nn.Module, neighbour: torch.nn.Module, regressions: Sequence[Payload]
    ) -> None:
        """With all of the policy its own error, with none the other's: of x_0, t times that of the velocity."""
        for payload in regressions:
            batch = pack_alone(model, payload)
            squares_N = latents.tensor(payload, "times").square()
            blended = _blended(model, module, neighbour, batch)
            squared_NK = blended.squared_NK.detach()
            with torch.no_grad():
                ours, theirs = (
                    -squares_N * model.decide(each, batch, temperature=1.0).logprobs_N for each in (module, neighbour)
                )
            for whose, column, expected_N in (("own", 2, ours), ("the other model's", 0, theirs)):
                if not torch.allclose(squared_NK[:, column], expected_N, rtol=_ERROR, atol=_ERROR):
                    fault(
                        f"a blend with a share of {_BLEND.shares[column]:g} is off by "
                        f"{squared_NK[:, column].tolist()}, and {whose} error of x_0 is "
                        f"{expected_N.tolist()}: t² times the regression's"
                    )
            # A square of what is linear in the share: three shares tell the fourth.
            none, half, all_, twice = squared_NK.unbind(1)
            bend = 2 * (all_ - 2 * half + none)
            if not torch.allclose(twice, none + 2 * (all_ - none - bend) + 4 * bend, rtol=1e-3, atol=1e-3):
                fault("errors of blends are no square of what is linear in the share; blend predictions, not errors")

    def test_blends_carry_the_gradient_of_the_policys_part(
        self, model: Model, module: torch.nn.Module, neighbour: torch.nn.Module, regressions: Sequence[Payload]
    ) -> None:
        """The squared errors do, and not the absolute ones that they are measured by."""
        batch = model.pack(regressions, budget=ROOM)[0]
        blended = _blended(model, module, neighbour, batch)
        if not blended.squared_NK.requires_grad:
            fault("squared errors of blends carry no gradient, so nothing would be learnt from them")
        if blended.absolute_NK.requires_grad:
            fault("absolute errors of blends carry a gradient; detach them")
        if bool((blended.absolute_NK.square() > blended.squared_NK.detach() * (1 + 1e-3) + 1e-5).any()):
            fault("a mean absolute error of a blend is larger than the root of the mean squared one")
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        sizes = []
        for column in (0, 2):
            total = blended.squared_NK[:, column].sum()
            grads = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
            sizes.append(sum(float(grad.square().sum()) for grad in grads if grad is not None))
        if sizes[0] or not sizes[1] > 0:
            fault(
                f"the squared norm of the gradient of a blend with none of the policy is {sizes[0]:.3g}, and with all "
                f"of it {sizes[1]:.3g}"
            )

    def test_blends_do_not_depend_on_what_else_is_packed(
        self, model: Model, module: torch.nn.Module, neighbour: torch.nn.Module, regressions: Sequence[Payload]
    ) -> None:
        """And change no log-prob; unasked, there are none."""
        batch = model.pack(regressions, budget=ROOM)[0]
        together = torch.split(_blended(model, module, neighbour, batch).squared_NK, list(batch.num_decisions))
        for number, index in enumerate(batch.sequences):
            alone = _blended(model, module, neighbour, pack_alone(model, regressions[index])).squared_NK
            if not torch.allclose(alone, together[number], rtol=1e-3, atol=_ERROR):
                fault(f"the blends of payload {index} change with what else is packed")
        plain = model.decide(module, batch, temperature=1.0)
        asked = model.decide(module, batch, temperature=1.0, prediction_for=_BLEND)
        if plain.blended is not None or asked.blended is not None or plain.prediction is not None:
            fault("decide() gave blends, or a prediction, that were not asked for")
        if not torch.allclose(plain.logprobs_N, asked.logprobs_N, atol=1e-6):
            fault("log-probs change when the prediction is asked for")


def _blended(model: Model, module: torch.nn.Module, neighbour: torch.nn.Module, batch: MicroBatch) -> Blended:
    """The blends of one module's predictions with another's."""
    with torch.no_grad():
        look: Decided = model.decide(neighbour, batch, temperature=1.0, prediction_for=_BLEND)
    if look.prediction is None:
        fault(f"decide(prediction_for={_BLEND}) gave no prediction")
    decided = model.decide(
        module, batch, temperature=1.0, kl_target=KLTarget(prediction=look.prediction, comparison=_BLEND)
    )
    blended, expected = decided.blended, (len(decided.logprobs_N), len(_BLEND.shares))
    if blended is None:
        fault(f"decide(kl_target={_BLEND}) gave no blends")
    for name, values_NK in (("squared_NK", blended.squared_NK), ("absolute_NK", blended.absolute_NK)):
        if values_NK.shape != expected or values_NK.dtype != torch.float32 or not bool(values_NK.isfinite().all()):
            fault(f"{name} is {values_NK.dtype} {tuple(values_NK.shape)}; give finite float32 {expected}")
    return blended
