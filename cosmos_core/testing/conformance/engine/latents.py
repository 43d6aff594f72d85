"""The kit for engines of latents: decisions that hold together, given frames, samples that can be looked at.

Shape legend: B latents of a batch, N decisions, C channels, T latent frames, H and W latent height and width, L words
of the text, E their width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np
import pytest
import torch

from cosmos_core.models.diffusion import GIVEN, IS_GIVEN, DiffusionModel, DiffusionOptions
from cosmos_core.protocols import EngineContext, FinishReason, Generated, Model, ModelContext, Preflight
from cosmos_core.protocols.world import WorldModel
from cosmos_core.testing.conformance.engine.kit import EngineConformance
from cosmos_core.testing.conformance.engine.subject import Subject, expect_array, flat
from cosmos_core.testing.conformance.model.subject import tensor_of
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload, Prompt

_TEXTS: Final = ("A red ball", "Once upon a time", "x", "What falls?", "A name")
_WIDTH: Final = 8


class _Velocity(torch.nn.Module):
    """The velocity at each place, of its channels, the time and the text."""

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        patch_size: tuple[int, int, int] = (1, 1, 1),  # noqa: ARG002 - of the config
        num_attention_heads: int = 1,  # noqa: ARG002 - likewise
        attention_head_dim: int = 2 * _WIDTH,
    ) -> None:
        super().__init__()
        enter = torch.nn.Linear(in_channels + 1 + _WIDTH, attention_head_dim)
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(enter, torch.nn.Tanh())])
        self.leave = torch.nn.Linear(attention_head_dim, out_channels)
        with torch.no_grad():
            for parameter in self.parameters():
                # So large that velocities are far from linear.
                parameter.mul_(2.0)

    def forward(self, latents_B: torch.Tensor, times_B: torch.Tensor, text_BLE: torch.Tensor) -> torch.Tensor:
        told = torch.cat([times_B[:, None], text_BLE.sum(1)], 1).to(latents_B.dtype)[..., None, None, None]
        places = torch.cat([latents_B, told.expand(-1, -1, *latents_B.shape[2:])], 1).movedim(1, -1)
        found: torch.Tensor = self.leave(self.blocks[0](places))
        return found.movedim(-1, 1)


class TinyDenoiser(DiffusionModel):
    """A world model, as small as one can be: places are denoised one by one; weights are drawn from a seed."""

    transformer = _Velocity
    layers = "blocks"
    neutral_guidance = 1.0
    text_width = _WIDTH

    def __init__(self) -> None:
        options = DiffusionOptions(num_frames=2, height=4, width=4, text="table", text_length=8)
        super().__init__(options, ModelContext(path=None, config={}, assets=Path()))

    def condition(self, prompt: Prompt) -> Mapping[str, torch.Tensor]:
        """`metadata` may ask for a first frame that is given: a grey one."""
        if not self.rows.num_given(prompt):
            return {}
        return {GIVEN: torch.full(self.shape, 0.5), IS_GIVEN: torch.arange(self.shape[1]) < 1}

    def denoise(
        self,
        module: torch.nn.Module,
        latents_B: torch.Tensor,
        times_B: torch.Tensor,
        text_BLE: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],  # noqa: ARG002 - none but the text
    ) -> torch.Tensor:
        """One forward."""
        found: torch.Tensor = module(latents_B, times_B, text_BLE)
        return found

    def guide(self, velocity_B: torch.Tensor, negative_B: torch.Tensor, guidance: torch.Tensor) -> torch.Tensor:
        """Away from the velocity without a text."""
        return negative_B + guidance * (velocity_B - negative_B)


class DenoisingEngineConformance(EngineConformance):
    """Tests that every engine of payloads of kind `latents` must pass: inherit it and set `plugin`.

    It is `EngineConformance` with a tiny world model from random weights, and what only such engines promise. A unit of
    a request is a denoising step there, and a unit of what was generated a decision. Override `decisions` where options
    make other steps decisions than all but the last.
    """

    temperature: ClassVar[float] = 1.0
    long_units: ClassVar[int] = 200
    whole: ClassVar[FinishReason] = FinishReason.STOP
    has_cache: ClassVar[bool] = False
    impossible: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **EngineConformance.impossible,
        "at a temperature between": {"temperature": 0.5},
        "for samples of the likeliest outcomes": {"top_k": 2},
        "for samples of the likeliest mass": {"top_p": 0.5},
    }

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Model:
        """The model to generate with: a tiny one that denoises."""
        return TinyDenoiser()

    @pytest.fixture
    def prompts(self, model: Model) -> list[Payload]:
        """Prompts; the third gives its first frame."""
        return [
            model.encode(Prompt(text=text, metadata={"num_given_frames": int(index == 2)}))
            for index, text in enumerate(_TEXTS)
        ]

    def decisions(self, max_units: int) -> int:
        """All steps but the last."""
        return max_units - 1

    def draws_at(self, temperature: float) -> bool:
        """Noise as the sampler has it, or none."""
        return temperature in (0.0, 1.0)

    def content(self, generated: Generated) -> bytes:
        """The sample, or the last state that it came to."""
        return _latents(generated).numpy().tobytes()

    def same(self, generated: Generated, other: Generated) -> bool:
        """Up to rounding, which depends on what else is in a batch."""
        found, wanted = _latents(generated), _latents(other)
        return found.shape == wanted.shape and torch.allclose(found, wanted, atol=self.tolerance, rtol=self.tolerance)

    def test_a_payload_of_latents_holds_what_its_kind_says(self, subject: Subject, context: EngineContext) -> None:
        """Samples are scored and imitated; a video goes on from the frames that its prompt gives."""
        denoiser = cast("WorldModel", context.model)
        requests = [subject.request(index, index, max_units=6) for index in (1, 2)]
        for request, (generated,) in zip(requests, subject.start().generate(requests), strict=True):
            payload, latent_spec = generated.payload, denoiser.latent_spec(request.prompt)
            if payload.kind != "latents":
                fault(f"the payload is of kind {payload.kind!r}; it must be 'latents'")
            expect_array(generated, "sample", "float32", latent_spec.shape)
            if latent_spec.given is None or latent_spec.is_given_T is None:
                continue
            states = tensor_of(payload, "states") if "states" in payload.arrays else ()
            for state in (tensor_of(payload, "sample"), *states):
                if not torch.equal(state[:, latent_spec.is_given_T], latent_spec.given[:, latent_spec.is_given_T]):
                    fault(
                        "frames that the prompt gives are others in a state or the sample; put them back at each step"
                    )

    def test_the_noise_of_transitions_is_standard_normal(self, subject: Subject) -> None:
        """Right log-probs of states that were drawn from something else bias every gradient."""
        many = subject.request("many", 0, num_samples=32, max_units=8)
        payloads = [each.payload for each in flat(subject.start().generate([many]))]
        if "states" not in payloads[0].arrays:
            pytest.skip("these options record no transitions")
        # Of a standard normal z the log-density but for the constant and the scale is -z²/2: its mean is known.
        priced = torch.cat(subject.pricer.logprobs(payloads, temperature=1.0))
        stds = torch.cat([tensor_of(payload, "steps")[:, 2] for payload in payloads])
        squares = -2.0 * (priced + stds.log() + 0.5 * float(np.log(2.0 * np.pi)))
        dims = tensor_of(payloads[0], "states")[0].numel()
        error = (2.0 / (dims * len(squares))) ** 0.5
        if abs(float(squares.mean()) - 1.0) > 5.0 * error:
            fault(
                f"x' of {len(squares)} steps lies {float(squares.mean()):.3f} variances from its mean on average: "
                f"of what is drawn with the standard deviation in `steps` it is 1 +- {error:.3f}"
            )

    def test_decisions_are_those_that_it_foresees(self, subject: Subject, preflight: Callable[..., Preflight]) -> None:
        """By them planning refuses algorithms that would take a squared error for a log-probability."""
        told = preflight()
        ((generated,),) = subject.start().generate([subject.request("one", 0, max_units=6)])
        made = "regressions" if "noise_seed" in generated.payload.arrays else "transitions"
        if told.decisions != made:
            fault(f"preflight() says decisions = {told.decisions!r}, and a sample has {made}")
        if told.most_decisions and generated.num_units > told.most_decisions:
            fault(f"preflight() says most_decisions = {told.most_decisions}, and a sample has {generated.num_units}")

    def test_without_noise_a_sample_depends_on_the_first_noise_alone(self, subject: Subject) -> None:
        """Evaluations compare versions of the weights, not draws."""
        seeds = (3, 3, 4)
        requests = [subject.request(index, 0, seed=seed, temperature=0.0) for index, seed in enumerate(seeds)]
        engine = subject.start()
        first, *others = [generated for each in requests for (generated,) in engine.generate([each])]
        if first.reason is not self.whole:
            fault(f"a sample at temperature 0 ended with {first.reason}, not {self.whole}")
        for seed, generated in zip(seeds[1:], others, strict=True):
            if not _latents(generated).isfinite().all():
                fault("a sample at temperature 0 is not finite")
            if self.same(first, generated) != (seed == 3):
                fault(
                    f"at temperature 0, a sample of seed {seed} {'is not' if seed == 3 else 'is'} that of seed 3; it "
                    "depends on the first noise, and on nothing else"
                )

    def test_samples_are_rendered(self, subject: Subject, context: EngineContext) -> None:
        """Rewards and people look at frames."""
        denoiser = cast("WorldModel", context.model)
        for generated in flat(subject.start().generate([subject.request("seen", 1, num_samples=2)])):
            if not subject.capabilities.renders:
                if generated.media is not None:
                    fault("a sample has media, and `renders` is not declared: declare it")
                continue
            if generated.media is None:
                fault("a sample has no media, and `renders` is declared")
            wanted = denoiser.render(tensor_of(generated.payload, "sample"), subject.prompts[1]).arrays["frames"]
            frames = generated.media.arrays.get("frames")
            if frames is None or frames.dtype != "uint8" or frames.shape[::3] != wanted.shape[::3]:
                told = frames and (frames.dtype, frames.shape)
                fault(f"frames are {told}; they must be uint8, such as {wanted.shape}")
            if frames.shape == wanted.shape and bytes(frames.data) != bytes(wanted.data):
                fault("the media of a sample are not what the model renders of it; is it another sample's?")


def _latents(generated: Generated) -> torch.Tensor:
    held = generated.payload
    return tensor_of(held, "sample") if "sample" in held.arrays else tensor_of(held, "states")[-1]
