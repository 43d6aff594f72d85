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
from cosmos_core.models.diffusion.packing import noise_of
from cosmos_core.protocols import Decided, Model
from cosmos_core.testing.conformance.model.denoising import left, transitions, walked
from cosmos_core.testing.conformance.model.kit import ModelConformance
from cosmos_core.testing.conformance.model.layouts import ModelSpreading
from cosmos_core.testing.conformance.model.subject import Subject, expect_refusal, tensor
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Payload, Prompt

_REGRESSION_ENTROPY: Final = 0.5 * math.log(2 * math.pi * math.e * 0.5)
"""Of a normal of variance 1/2, as which a regression counts."""
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

    def forward(self, module: Any, latents: Any, time: Any, text: Any) -> torch.Tensor:  # noqa: ARG002 - for overrides
        """The velocity by the family's library."""
        fault(f"{type(self).__name__} does not say what the family's library computes: override forward")

    def guided(self, velocity: Any, negative: Any, guidance: float) -> torch.Tensor:  # noqa: ARG002 - for overrides
        """The guided velocity by the family's library."""
        fault(f"{type(self).__name__} does not say how guidance combines two velocities: override guided")

    @pytest.fixture
    def prompts(self, make: Callable[..., Any], tmp_path: Path) -> Sequence[Prompt]:
        """Two captions with a video to imitate."""
        options = make().options
        film = _film(options, options.num_frames, tmp_path / "film.npy")
        return tuple(Prompt(text=words, demonstration=film) for words in ("red", "two words"))

    @pytest.fixture
    def payloads(self, model: DiffusionModel, prompts: Sequence[Prompt]) -> Sequence[Payload]:
        """Regressions and transitions under guidance, in turn."""
        made = []
        for index in range(5):
            prompt = prompts[index % len(prompts)]
            if index % 2 == 0:
                sample = model.encode_demonstration(prompt)
                made.append(model.noised(sample, index, num_decisions=1 + (index + 2) % 4))
            else:
                shown, guidance = model.encode(prompt), model.neutral_guidance + 1.5
                made.append(walked(shown, model.latent_spec(shown), number=2, guidance=guidance, seed=index))
        return made

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
                expect_refusal(f"{name}() passes a row whose demonstration {what}", getattr(model, name), row)

    def test_facts_say_what_a_decision_keeps(self, subject: Subject) -> None:
        """Plans tell from it what a micro-batch takes."""
        model: Any = subject.model
        parts = model.facts().parts
        if not all("float32" in part.kept for part in parts):
            pytest.skip("not declared: the model's facts do not say what its parts keep")
        each = [(part.count, part.kept["float32"]) for part in parts]
        said = sum(count * (kept.stream + kept.inputs + kept.inner + kept.heads + kept.routed) for count, kept in each)
        demonstration = model.encode_demonstration(subject.prompts[0])
        few, many = (_kept(subject, model.noised(demonstration, 0, num_decisions=number)) for number in (2, 6))
        if abs(said / (found := (many - few) / 4) - 1) > _KEPT:
            fault(f"facts() say that a decision keeps {said:.0f} bytes for the backward pass, and it keeps {found:.0f}")

    @torch.no_grad()
    def reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, temperature: float
    ) -> list[Decided]:
        """The decisions of each payload by the velocities of the family's library, at temperature 1."""
        assert isinstance(model, DiffusionModel)
        assert temperature == 1.0
        options = model.options
        if options.text != "table" or options.negative_embedding is not None or not options.negative_prompt:
            fault(
                "the kit knows the texts of a table alone; give options text = 'table', a negative_prompt, such as "
                f"'grey', and no negative_embedding: they are {options.text!r}, {options.negative_prompt!r} and "
                f"{options.negative_embedding!r}"
            )
        return [self._decided(model, module, payload) for payload in payloads]

    def load_exported(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """The tensors of the exported transformer, as diffusers loads it."""
        from diffusers import AutoModel  # noqa: PLC0415 - it takes seconds, and transformers come first

        loaded: Any = AutoModel.from_pretrained(str(directory), subfolder="transformer")  # type: ignore[no-untyped-call]
        tensors: Mapping[str, torch.Tensor] = loaded.state_dict()
        return tensors

    def _decided(self, model: DiffusionModel, module: torch.nn.Module, payload: Payload) -> Decided:
        # Of payloads alone: a model that shows its transformer something else is to be found out.
        texts = _text(model, payload), _text(model, model.encode(Prompt(text=model.options.negative_prompt or "")))
        times_N = tensor(payload, "times")

        def velocity(states_N: torch.Tensor, guidance: float) -> torch.Tensor:
            found_N, negative_N = (
                torch.cat(
                    [self.forward(module, states_N[n, None], times_N[n, None], text) for n in range(len(times_N))]
                )
                for text in texts
            )
            return found_N if guidance == model.neutral_guidance else self.guided(found_N, negative_N, guidance)

        if "states" in payload.arrays:
            return transitions(payload, velocity(left(payload), float(tensor(payload, "guidance"))))
        sample, seed, t = (
            tensor(payload, "sample"),
            int(tensor(payload, "noise_seed")),
            times_N[:, None, None, None, None],
        )
        noise_N = torch.stack([noise_of(seed, number, tuple(sample.shape)) for number in range(len(times_N))])
        errors = velocity((1 - t) * sample + t * noise_N, model.neutral_guidance) - (noise_N - sample)
        logprobs_N = -errors.square().flatten(1).mean(1)
        return Decided(logprobs_N=logprobs_N, entropy_N=torch.full_like(logprobs_N, _REGRESSION_ENTROPY))


def _text(model: DiffusionModel, payload: Payload) -> torch.Tensor:
    """The text that the transformer is to be shown [1, L, E]: a payload's text, filled up with zeros."""
    text_LE = tensor(payload, TEXT)
    return torch.nn.functional.pad(text_LE, (0, 0, 0, model.options.text_length - len(text_LE)))[None]


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
