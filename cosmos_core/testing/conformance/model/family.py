"""The kit for families of world models on `DiffusionModel`: a family says how its own library calls the transformer.

Shape legend: N decisions of a payload, C channels, T latent frames, H and W latent height and width, L tokens of the
text, E their width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion import TEXT, DiffusionModel, DiffusionOptions
from cosmos_core.models.diffusion.noising import noise_of
from cosmos_core.protocols import Decided, Model
from cosmos_core.protocols.facts import Kept
from cosmos_core.testing.conformance.model.denoising import walked
from cosmos_core.testing.conformance.model.kit import ModelConformance
from cosmos_core.testing.conformance.model.layouts import ModelSpreading
from cosmos_core.testing.conformance.model.subject import Subject, expect_refusal, tensor
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Payload, Prompt

_WORDS: Final = ("red", "two words")
_BESIDE: Final = 1.5
"""Of the guidance of transitions, above the neutral one."""
_REGRESSION_ENTROPY: Final = 0.5 * math.log(2 * math.pi * math.e * 0.5)
"""Of a normal of variance 1/2, as which a regression counts."""

_NUMBERS: Final = (2, 6)
_KEPT: Final = 0.15
"""Largest error of what facts say that a decision keeps: what the loss keeps is not in them."""


# A norm of a transformer may keep float32 weights under autocast, which torch says once.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
class DenoisingModelConformance(ModelSpreading, ModelConformance):
    """Tests that every family of world models on `DiffusionModel` must pass, on a tiny one whose latents are pixels.

    It is `ModelConformance` with rows, payloads and a reference of its own, and compares layouts more closely. A family
    sets `plugin` and `config`, overrides the fixture `options`, and says what its library computes. Texts come from a
    table, so that the kit knows what the transformer is shown, and the negative prompt has words, so that it shows:

        class TestWan(DenoisingModelConformance):
            plugin = "wan"
            config = CONFIG

            @pytest.fixture
            def options(self):
                return {"num_frames": 4, ..., "text": "table", "text_length": 4, "negative_prompt": "grey"}

            def forward(self, module, latents, time, text):
                return module(hidden_states=latents, timestep=1000 * time, ...)[0]

            def guided(self, velocity, negative, guidance):
                return negative + guidance * (velocity - negative)

    Methods to override:
        forward(module, latents, time, text): The velocity [1, C, T, H, W] as the family's library calls the transformer
            for latents [1, C, T, H, W] of which no frame is given, a time [1] in [0, 1], 1 being noise, and a text
            [1, L, E].
        guided(velocity, negative, guidance): How its pipeline combines the velocities of the prompt and of the negative
            prompt.
    """

    tokenizer: ClassVar[Mapping[str, JSON] | None] = None
    temperatures: ClassVar[Sequence[float]] = (1.0,)

    def forward(
        self,
        module: torch.nn.Module,  # noqa: ARG002 - what an override reads
        latents: torch.Tensor,  # noqa: ARG002
        time: torch.Tensor,  # noqa: ARG002
        text: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """The velocity by the family's library."""
        fault(f"{type(self).__name__} does not say what the family's library computes: override forward")

    def guided(
        self,
        velocity: torch.Tensor,  # noqa: ARG002 - likewise
        negative: torch.Tensor,  # noqa: ARG002
        guidance: float,  # noqa: ARG002
    ) -> torch.Tensor:
        """The guided velocity by the family's library."""
        fault(f"{type(self).__name__} does not say how guidance combines two velocities: override guided")

    @pytest.fixture
    def prompts(self, make: Callable[..., Any], tmp_path: Path) -> Sequence[Prompt]:
        """Two captions with a video to imitate."""
        options = make().options
        film = _film(options, options.num_frames, tmp_path / "film.npy")
        return tuple(Prompt(text=words, demonstration=film) for words in _WORDS)

    @pytest.fixture
    def payloads(self, model: DiffusionModel, prompts: Sequence[Prompt]) -> Sequence[Payload]:
        """Regressions and transitions under guidance, in turn."""
        return [_payload(model, prompts[index % len(prompts)], index) for index in range(5)]

    def test_a_demonstration_can_be_vetted(self, model: Model, prompts: Sequence[Prompt], tmp_path: Path) -> None:
        """Planning asks `vet` about some rows, so that a run does not find out later."""
        if not hasattr(model, "vet"):
            pytest.skip("not declared: the model has no `vet`")
        for index, prompt in enumerate(prompts):
            try:
                model.vet(prompt)
            except DataError as error:
                fault(f"vet() refuses row {index}, which can be encoded: {error}")
        unusable = {"no-such-film.mp4": "is no file"}
        if (options := getattr(model, "options", None)) is not None and options.num_frames > 1:
            unusable[_film(options, options.num_frames - 1, tmp_path / "short.npy")] = "is a frame too short"
        for film, what in unusable.items():
            for name in ("encode_demonstration", "vet"):
                row = attrs.evolve(prompts[0], demonstration=film)
                what_passes = f"{name}() passes a row whose demonstration {what}"
                expect_refusal(what_passes, getattr(model, name), row)

    def test_facts_say_what_a_decision_keeps(self, subject: Subject) -> None:
        """Plans tell from it what a micro-batch takes."""
        model: Any = subject.model
        parts = model.facts().parts
        if not all("float32" in part.kept for part in parts):
            pytest.skip("not declared: the model's facts do not say what its parts keep")
        said = sum(part.count * _all_of(part.kept["float32"]) for part in parts)
        demonstration = model.encode_demonstration(subject.prompts[0])
        few, many = (_kept(subject, model.noised(demonstration, 0, num_decisions=number)) for number in _NUMBERS)
        found = (many - few) / (_NUMBERS[1] - _NUMBERS[0])
        if abs(said / found - 1) > _KEPT:
            fault(f"facts() say that a decision keeps {said:.0f} bytes for the backward pass, and it keeps {found:.0f}")

    def reference(
        self,
        model: Model,
        module: torch.nn.Module,
        payloads: Sequence[Payload],
        *,
        temperature: float,  # noqa: ARG002 - it is 1
    ) -> list[Decided]:
        """The decisions of each payload by the velocities of the family's library."""
        assert isinstance(model, DiffusionModel)
        options = model.options
        if options.text != "table" or options.negative_embedding is not None or not options.negative_prompt:
            fault(
                "the kit knows the texts of a table alone; give options text = 'table', a negative_prompt, such as "
                f"'grey', and no negative_embedding: they are {options.text!r}, {options.negative_prompt!r} and "
                f"{options.negative_embedding!r}"
            )
        with torch.no_grad():
            return [self._decisions(model, module, payload) for payload in payloads]

    def load_exported(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """The tensors of the exported transformer, as diffusers loads it."""
        from diffusers import AutoModel  # noqa: PLC0415 - it takes seconds, and transformers come first

        loaded: Any = AutoModel
        tensors: Mapping[str, torch.Tensor] = loaded.from_pretrained(
            str(directory), subfolder="transformer"
        ).state_dict()
        return tensors

    def _decisions(self, model: DiffusionModel, module: torch.nn.Module, payload: Payload) -> Decided:
        # Of payloads alone: a model that shows its transformer something else is to be found out.
        texts = _text(model, payload), _text(model, model.encode(Prompt(text=model.options.negative_prompt or "")))

        def velocity(state: torch.Tensor, time: torch.Tensor, guidance: float) -> torch.Tensor:
            found, negative = (self.forward(module, state[None], time[None], text)[0] for text in texts)
            is_neutral = guidance == model.neutral_guidance
            return found if is_neutral else self.guided(found, negative, guidance)

        times_N = tensor(payload, "times")
        if "states" not in payload.arrays:
            sample, seed = tensor(payload, "sample"), int(tensor(payload, "noise_seed"))
            errors = []
            for number, time in enumerate(times_N):
                noise = noise_of(seed, number, tuple(sample.shape))
                found = velocity((1 - time) * sample + time * noise, time, model.neutral_guidance)
                errors.append((found - (noise - sample)).square().mean())
            return Decided(logprobs_N=-torch.stack(errors), entropy_N=torch.full((len(errors),), _REGRESSION_ENTROPY))
        states, offsets = tensor(payload, "states"), tensor(payload, "offsets")
        guidance = float(tensor(payload, "guidance"))
        logprobs, entropies = [], []
        for number, (a, b, std) in enumerate(tensor(payload, "steps")):
            before, after = tensor(payload, "places")[number].tolist()
            mean = a * states[before] + b * velocity(states[before], times_N[number], guidance) + offsets[number]
            normal: Any = torch.distributions.Normal(mean, std)
            logprobs.append(normal.log_prob(states[after]).mean())
            entropies.append(normal.entropy().mean())
        return Decided(logprobs_N=torch.stack(logprobs), entropy_N=torch.stack(entropies))


def _text(model: DiffusionModel, payload: Payload) -> torch.Tensor:
    """The text that the transformer is to be shown [1, L, E]: a payload's text, filled up with zeros."""
    text_LE = tensor(payload, TEXT)
    return torch.nn.functional.pad(text_LE, (0, 0, 0, model.options.text_length - len(text_LE)))[None]


def _all_of(kept: Kept) -> float:
    return kept.stream + kept.inputs + kept.inner + kept.heads + kept.routed


def _film(options: DiffusionOptions, num_frames: int, path: Path) -> str:
    """A video of the size that is generated; its file."""
    shape = num_frames, options.height, options.width, 3
    np.save(path, np.random.default_rng(0).integers(0, 255, shape, np.uint8))
    return str(path)


def _kept(subject: Subject, payload: Payload) -> int:
    """Bytes that autograd keeps of a micro-batch, besides parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in subject.module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Held, so that the address of one does not come again.
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        subject.decide(subject.pack_alone(payload))
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


def _payload(model: DiffusionModel, prompt: Prompt, index: int) -> Payload:
    if index % 2 == 0:
        return model.noised(model.encode_demonstration(prompt), index, num_decisions=1 + (index + 2) % 4)
    condition = model.encode(prompt)
    guidance = model.neutral_guidance + _BESIDE
    return walked(condition, model.latent_spec(condition), number=2, guidance=guidance, seed=index)
