"""Payloads of latents that the kit makes itself, and their arrays as tensors.

Shape legend: N decisions of a payload, C channels, T latent frames, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.errors import DataError
from cosmos_core.protocols import Decided, MicroBatch, Model, ModelCapabilities
from cosmos_core.protocols.frozen import Blend, Blended, KLTarget
from cosmos_core.protocols.vision import Conditioned, Conditioning
from cosmos_core.protocols.world import LatentSpec
from cosmos_core.testing.conformance.model.subject import CPU, ROOM, SEED, ModelSetting, pack_alone
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Array, Payload, Prompt

KIND: Final = "latents"


def array(values: torch.Tensor) -> Array:
    """A tensor as it travels."""
    held = np.asarray(values.numpy(), order="C")
    return Array(dtype=str(held.dtype), shape=held.shape, data=held.tobytes())


def tensor(payload: Payload, name: str) -> torch.Tensor:
    """An array of a payload."""
    held = payload.arrays[name]
    return torch.from_numpy(np.frombuffer(bytes(held.data), held.dtype).reshape(held.shape).copy())


def drawn(latent_spec: LatentSpec, number: int, seed: int) -> torch.Tensor:
    """Latents from noise, float32 [number, C, T, H, W], with the frames that the latent spec gives in place."""
    latents = torch.randn(number, *latent_spec.shape, generator=torch.Generator().manual_seed(seed))
    if latent_spec.given is None or latent_spec.is_given_T is None:
        return latents
    return torch.where(latent_spec.is_given_T[:, None, None], latent_spec.given, latents)


def walked(prompt: Payload, latent_spec: LatentSpec, *, number: int, guidance: float, seed: int = 0) -> Payload:
    """Transitions whose states and steps are made up; the last has an offset, too."""
    generator = torch.Generator().manual_seed(seed)
    places_N = torch.arange(number, dtype=torch.int32)
    steps = torch.rand(number, 3, generator=generator) + torch.tensor([0.5, -1.0, 0.3])
    offsets = torch.zeros(number, *latent_spec.shape)
    offsets[-1] = 0.1
    made = {
        "states": drawn(latent_spec, number + 1, seed + 1),
        "places": torch.stack([places_N, places_N + 1], 1),
        "times": torch.linspace(1.0, 0.2, number),
        "steps": steps,
        "offsets": offsets,
        "guidance": torch.tensor(guidance),
    }
    arrays = {name: array(values) for name, values in made.items()}
    return attrs.evolve(prompt, arrays={**prompt.arrays, **arrays})


def mean(values_N: torch.Tensor, latent_spec: LatentSpec) -> torch.Tensor:
    """The mean [N] of [N, C, T, H, W] over what is decided: all but the frames that the latent spec gives."""
    if latent_spec.is_given_T is not None:
        values_N = values_N[:, :, ~latent_spec.is_given_T]
    return values_N.flatten(1).mean(1)


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
            squares_N = tensor(payload, "times").square()
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


class ModelConditioning(ModelSetting):
    """`condition` and `enter` of a model that has them."""

    @pytest.fixture
    def conditioned(self, model: Model) -> Conditioned:
        """The model, as one whose prompts may show something."""
        if not isinstance(model, Conditioned):
            pytest.skip("not declared: prompts are token ids alone (`Conditioned`)")
        return model

    @pytest.fixture
    def conditioned_prompts(
        self,
        model: Model,
        conditioned: Conditioned,  # noqa: ARG002 - it skips where there is none
        prompts: Sequence[Prompt],
    ) -> Sequence[Payload]:
        """Prompts that show something."""
        shown = [model.encode(prompt) for prompt in prompts if prompt.media]
        if not shown:
            fault("the model is `Conditioned`, and none of `prompts` shows anything; give some of them media")
        return shown

    def test_text_needs_no_conditioning(
        self, model: Model, conditioned: Conditioned, prompts: Sequence[Prompt]
    ) -> None:
        """An engine computes prompts of text as it does for any model."""
        if any(conditioned.condition(model.encode(prompt)) is not None for prompt in prompts if not prompt.media):
            fault("condition() of a prompt without media gave something; give None where token ids say it all")

    def test_every_unit_of_a_prompt_has_a_position_and_features(
        self, conditioned: Conditioned, module: torch.nn.Module, conditioned_prompts: Sequence[Payload]
    ) -> None:
        """An engine cuts prompts into pieces, anywhere."""
        for payload in conditioned_prompts:
            units = payload.arrays["prompt"].shape[0]
            conditioning = self._condition(conditioned, payload)
            if conditioning.positions.shape[-1] != units or conditioning.positions.dtype != torch.int64:
                fault(f"positions of {units} units are {list(conditioning.positions.shape)}; give int64 [..., {units}]")
            with torch.no_grad():
                features = conditioned.enter(module, conditioning)
            if odd := {name: list(rows.shape) for name, rows in features.items() if len(rows) != units}:
                fault(f"enter() of {units} units gave {odd}; give a row for each unit")

    def test_what_enters_follows_the_weights(
        self, model: Model, conditioned: Conditioned, module: torch.nn.Module, conditioned_prompts: Sequence[Payload]
    ) -> None:
        """After an update an engine asks again, with what it was told of the prompt before."""
        conditioning = self._condition(conditioned, conditioned_prompts[0])
        other = model.build(seed=1, dtype=torch.float32, device=torch.device("cpu"))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)  # those of a checkpoint are not drawn
            one, again, changed = (conditioned.enter(each, conditioning) for each in (module, module, other))
        if any(not torch.equal(one[name], again[name]) for name in one):
            fault("enter() gave something else for the same weights and prompt")
        if all(torch.equal(one[name], changed[name]) for name in one):
            fault("enter() gave the same for other weights; keep nothing from one call to the next")

    def test_a_prompt_that_lacks_an_array_is_refused(
        self, conditioned: Conditioned, conditioned_prompts: Sequence[Payload]
    ) -> None:
        """An engine refuses a request when it comes, not when it is computed."""
        for lost in conditioned_prompts[0].arrays.keys() - {"prompt"}:
            rest = {name: array for name, array in conditioned_prompts[0].arrays.items() if name != lost}
            try:
                conditioned.condition(attrs.evolve(conditioned_prompts[0], arrays=rest))
            except DataError:
                continue
            fault(f"condition() took a prompt that shows something without its array {lost!r}; raise DataError")

    def test_an_array_that_it_does_not_know_is_refused(
        self, model: Model, conditioned: Conditioned, prompts: Sequence[Prompt]
    ) -> None:
        """Of a prompt of text, too: nothing that a request holds is left out unsaid."""
        for prompt in prompts:
            payload = model.encode(prompt)
            odd = {**payload.arrays, "kit-made": payload.arrays["prompt"]}
            try:
                conditioned.condition(attrs.evolve(payload, arrays=odd))
            except DataError:
                continue
            fault("condition() took a prompt with an array that no model knows, 'kit-made'; raise DataError")

    @staticmethod
    def _condition(conditioned: Conditioned, payload: Payload) -> Conditioning:
        conditioning = conditioned.condition(payload)
        if conditioning is None:
            fault("condition() of a prompt that shows something gave None; it would be computed as text")
        return conditioning
