"""A world model, as small as one can be: it denoises, learns from transitions and regressions, and splits sequences.

Shape legend: N decisions of a micro-batch, C channels, T latent frames, H and W latent height and width, E width of the
text.
"""

import json
import math
from pathlib import Path

import attrs
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from cosmos_core.errors import CheckpointError, DataError
from cosmos_core.protocols import Decided, MicroBatch, ModelCapabilities, ModelFacts, NoOptions, Provider, hookimpl
from cosmos_core.protocols.frozen import Blend, Blended
from cosmos_core.protocols.model import Span
from cosmos_core.protocols.world import LatentSpec
from cosmos_core.types import Array, Payload

SHAPE = (2, 3, 2, 2)
WIDTH = 4
REGRESSIONS = 3


def array(values, dtype="float32"):
    values = np.asarray(values, dtype, order="C")
    return Array(dtype=str(values.dtype), shape=values.shape, data=values.tobytes())


def view(payload, name):
    held = payload.arrays[name]
    return torch.from_numpy(np.frombuffer(bytes(held.data), held.dtype).reshape(held.shape).copy())


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def offset(payload, number):
    return view(payload, "offsets")[number] if "offsets" in payload.arrays else 0.0


def guidance_of(payload):
    return view(payload, "guidance") if "guidance" in payload.arrays else torch.tensor(World.neutral_guidance)


class Flow(torch.nn.Module):
    """Mixes channels at each place, with the mean of all frames there."""

    def __init__(self):
        super().__init__()
        channels = SHAPE[0]
        self.into = torch.nn.Linear(2 * channels, 8)
        self.clock = torch.nn.Linear(2, 8, bias=False)
        self.text = torch.nn.Linear(WIDTH, 8, bias=False)
        self.out = torch.nn.Linear(8, channels)

    def forward(self, states_N, times_N, texts_NE):
        dtype = self.into.weight.dtype
        places = states_N.movedim(1, -1)
        places = torch.cat([places, places.mean(1, keepdim=True).expand_as(places)], -1).to(dtype)
        clock = torch.stack([times_N, times_N.square()], -1).to(dtype)
        beside = self.clock(clock) + self.text(texts_NE.to(dtype))
        return self.out(torch.tanh(self.into(places) + beside[:, None, None, None])).movedim(-1, 1).float()


@attrs.frozen
class World:
    options: NoOptions
    context: object

    neutral_guidance = 1.0

    def facts(self):
        return ModelFacts(
            architecture="Flow",
            num_parameters=8 * (2 * SHAPE[0] + 1) + 8 * 2 + 8 * WIDTH + SHAPE[0] * (8 + 1),
            num_layers=1,
            hidden_size=8,
            context_length=1 << 20,
        )

    def build(self, *, seed, dtype, device, layout=None):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = Flow()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(2.0)
        if self.context.path is not None:
            module.load_state_dict(load_file(Path(self.context.path) / "model.safetensors"))
        return module.to(dtype=dtype, device=device).eval()

    def encode(self, prompt):
        if not isinstance(prompt.text, str):
            raise DataError("the prompt is a chat; give plain text")
        letters = np.frombuffer(prompt.text.encode().ljust(WIDTH)[:WIDTH], np.uint8)
        arrays = {"text": array(letters[None] / 64 - 1.5)}
        if prompt.media:
            frames = torch.zeros(SHAPE)
            frames[:, :1] = float(prompt.media[0])
            arrays |= {"given": array(frames), "is_given": array(np.arange(SHAPE[1]) < 1, "bool")}
        return Payload(kind="latents", arrays=arrays)

    def encode_demonstration(self, prompt):
        if prompt.demonstration is None:
            raise DataError(f"the row {prompt.text!r} has no video to imitate")
        sample = drawn(sum(prompt.demonstration.encode()), *SHAPE)
        encoded = self.encode(prompt)
        if "given" in encoded.arrays:
            sample[:, :1] = view(encoded, "given")[:, :1]
        return Payload(kind="latents", arrays={**encoded.arrays, "sample": array(sample)})

    def noised(self, payload, seed, *, num_decisions=None):
        generator = torch.Generator().manual_seed(seed)
        times = torch.rand(num_decisions or REGRESSIONS, generator=generator)
        noise_seed = torch.randint(1 << 40, (), generator=generator)
        return attrs.evolve(
            payload, arrays={**payload.arrays, "times": array(times), "noise_seed": array(noise_seed, "int64")}
        )

    def decode(self, payload):
        return ""

    def pack(self, payloads, *, budget, multiple=1, is_uniform=False):
        rows = []
        for index, payload in enumerate(payloads):
            if payload.kind != "latents":
                raise DataError(f"payload {index} is of kind {payload.kind!r}; give latents")
            rows += [(index, *each) for each in self._decisions(payload)]
        return [self._lay_out(payloads, rows[start : start + budget]) for start in range(0, len(rows), budget)]

    def _decisions(self, payload):
        times = view(payload, "times")
        if "noise_seed" in payload.arrays:
            sample, seed = view(payload, "sample"), int(view(payload, "noise_seed"))
            for number, time in enumerate(times):
                noise = drawn((seed + number) % (1 << 62), *SHAPE)
                noised = (1 - time) * sample + time * noise
                if "given" in payload.arrays:
                    noised = torch.where(view(payload, "is_given")[:, None, None], view(payload, "given"), noised)
                yield number, noised, time, noise - sample, torch.tensor([0.0, 1.0, 0.0])
            return
        states, places = view(payload, "states"), view(payload, "places")
        for number, (before, after) in enumerate(places.tolist()):
            aim = states[after] - offset(payload, number)
            yield number, states[before], times[number], aim, view(payload, "steps")[number]

    def _lay_out(self, payloads, rows):
        numbers = {}
        for index, number, *_ in rows:
            numbers.setdefault(index, []).append(number)
        totals = {index: payloads[index].arrays["times"].shape[0] for index in numbers}
        given = [payloads[index].arrays.get("is_given") for index, *_ in rows]
        return MicroBatch(
            sequences=tuple(numbers),
            num_decisions=tuple(map(len, numbers.values())),
            num_units=len(rows),
            spans=tuple(Span(first=each[0], total=totals[index]) for index, each in numbers.items()),
            inputs={
                "states": torch.stack([state for _, _, state, *_ in rows]),
                "times": torch.stack([time for _, _, _, time, *_ in rows]),
                "aims": torch.stack([aim for *_, aim, _ in rows]),
                "steps": torch.stack([step for *_, step in rows]),
                "guidance": torch.stack([guidance_of(payloads[index]) for index, *_ in rows]),
                "texts": torch.stack([view(payloads[index], "text").mean(0) for index, *_ in rows]),
                "decided": torch.stack(
                    [
                        torch.ones(SHAPE[1]) if each is None else 1.0 - torch.tensor([*bytes(each.data)]).float()
                        for each in given
                    ]
                ),
            },
        )

    def decide(
        self,
        module,
        batch,
        *,
        temperature,
        with_entropy=False,
        prediction_for=None,
        kl_target=None,
        with_features=False,
    ):
        held = batch.inputs
        velocity = self._guided(module, held["states"], held["times"], held["texts"], held["guidance"])

        def mean(values):
            decided = held["decided"][:, None, :, None, None].expand_as(values)
            return (values * decided).flatten(1).sum(1) / decided.flatten(1).sum(1)

        def wide(values_N):
            return values_N[:, None, None, None, None]

        a_N, b_N, std_N = held["steps"].unbind(1)
        # A regression counts as normal with variance 1/2: its density is the negative error, up to a constant.
        is_regression_N = std_N == 0
        safe_N = std_N.where(~is_regression_N, 0.5**0.5)
        apart = held["aims"] - wide(a_N) * held["states"] - wide(b_N) * velocity
        constant_N = safe_N.log() + 0.5 * math.log(2 * math.pi)
        logprobs_N = -mean(apart.square()) / (2 * safe_N.square()) - constant_N
        logprobs_N = torch.where(is_regression_N, -mean((velocity - held["aims"]).square()), logprobs_N)
        found = {}
        if prediction_for is not None:
            found["prediction"] = {"velocity": velocity.detach()}
        if kl_target is not None:
            theirs = kl_target.prediction["velocity"]
            if isinstance(kl_target.comparison, Blend):
                found["blended"] = self._blended(held, velocity, theirs, kl_target.comparison, mean)
            else:
                found["divergence_N"] = b_N.square() * mean((velocity - theirs).square()) / (2 * safe_N.square())
        return Decided(logprobs_N=logprobs_N, entropy_N=(constant_N + 0.5).detach() if with_entropy else None, **found)

    def _blended(self, held, velocity, theirs, blend, mean):
        times = held["times"][:, None, None, None, None]
        errors = [times * (share * velocity + (1 - share) * theirs - held["aims"]) for share in blend.shares]
        return Blended(
            squared_NK=torch.stack([mean(error.square()) for error in errors], 1),
            absolute_NK=torch.stack([mean(error.detach().abs()) for error in errors], 1),
        )

    def latent_spec(self, prompt):
        if "given" not in prompt.arrays:
            return LatentSpec(shape=SHAPE)
        return LatentSpec(shape=SHAPE, given=view(prompt, "given"), is_given_T=view(prompt, "is_given"))

    def velocity(self, module, latents_B, times_B, prompts, *, guidance):
        texts = torch.stack([view(prompt, "text").mean(0) for prompt in prompts])
        found = self._guided(module, latents_B, times_B, texts, torch.full_like(times_B, guidance))
        given = torch.stack([self._is_given(prompt) for prompt in prompts])
        return found.masked_fill(given[:, None, :, None, None], 0.0)

    def _guided(self, module, states_N, times_N, texts_NE, guidance_N):
        found = module(states_N, times_N, texts_NE)
        if (guidance_N == self.neutral_guidance).all():
            return found
        plain = module(states_N, times_N, torch.zeros_like(texts_NE))
        return plain + guidance_N[:, None, None, None, None] * (found - plain)

    def _is_given(self, prompt):
        return view(prompt, "is_given") if "is_given" in prompt.arrays else torch.zeros(SHAPE[1], dtype=torch.bool)

    def render(self, latents, prompt):
        frames = ((latents.movedim(0, -1).mean(-1, keepdim=True) + 1) * 127.5).clamp(0, 255).expand(-1, -1, -1, 3)
        return Payload(kind="media", arrays={"frames": array(frames, "uint8"), "fps": array(8.0)})

    def export(self, module, directory, *, dtype=None):
        if dtype is None and self.context.path is not None:
            dtype = next(iter(load_file(Path(self.context.path) / "model.safetensors").values())).dtype
        tensors = {name: each.to(dtype or each.dtype) for name, each in module.state_dict().items()}
        if any(torch.isinf(each).any() for each in tensors.values()):
            raise CheckpointError(f"a tensor has values beyond {dtype}")
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({}))
        return [next(iter(tensors.values())).dtype]

    def prepare(self, corpus, tokenizer):
        raise AssertionError("there is nothing to make")


def walked(prompt, number, seed, versions=0):
    """What an engine that denoises with noise would make of it: transitions, with log-probs that are made up."""
    states = drawn(seed, number + 1, *SHAPE)
    if "given" in prompt.arrays:
        states[:, :, :1] = view(prompt, "given")[:, :1]
    steps = torch.rand(number, 3, generator=torch.Generator().manual_seed(seed)) + torch.tensor([0.5, -1.0, 0.3])
    return Payload(
        kind="latents",
        arrays={
            **prompt.arrays,
            "states": array(states),
            "places": array(np.stack([np.arange(number), np.arange(1, number + 1)], 1), "int32"),
            "times": array(np.linspace(1, 1 / number, number)),
            "steps": array(steps),
            "guidance": array(1.0),
            "logprobs": array(-np.abs(drawn(seed + 1, number).numpy())),
            "versions": array(np.full(number, versions), "int32"),
        },
    )


@hookimpl
def cosmos_model():
    return Provider(
        create=World,
        capabilities=ModelCapabilities(
            payload_kinds=frozenset({"latents"}), divergences=frozenset({"forward-kl", "reverse-kl"}), blends=True
        ),
    )
