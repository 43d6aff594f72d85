"""A world model, as small as one can be: each place of a latent frame is denoised by itself, knowing time and text.

It is written apart from the building blocks of world models, so that engines are compared with something else.

Shape legend: B latents of a batch, N decisions of a micro-batch, C channels, T latent frames, H and W latent height and
width, E width of a text's embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs
import numpy as np
import torch

from cosmos_core.errors import DataError
from cosmos_core.protocols import Decided, Layout, MicroBatch, ModelFacts
from cosmos_core.protocols.frozen import Comparison, KLTarget
from cosmos_core.protocols.model import Span
from cosmos_core.protocols.world import LatentSpec
from cosmos_core.types import Array, Payload, Prompt

_SHAPE: Final = (3, 2, 4, 4)
_WIDTH: Final = 8
_HIDDEN: Final = 16
_GUIDANCE: Final = 1.0


class _Net(torch.nn.Module):
    """The velocity at each place, of its channels, the time and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(_SHAPE[0] + 1 + _WIDTH, _HIDDEN)
        self.leave = torch.nn.Linear(_HIDDEN, _SHAPE[0])

    def forward(self, latents_B: torch.Tensor, times_B: torch.Tensor, texts_BE: torch.Tensor) -> torch.Tensor:
        places = latents_B.permute(0, 2, 3, 4, 1)
        told = torch.cat([times_B[:, None], texts_BE], 1)[:, None, None, None].expand(*places.shape[:4], -1)
        dtype = self.enter.weight.dtype
        hidden = torch.tanh(self.enter(torch.cat([places, told], -1).to(dtype)))
        found: torch.Tensor = self.leave(hidden).permute(0, 4, 1, 2, 3).float()
        return found


@final
@attrs.frozen
class TinyDenoiser:
    """A `Model` that is a `WorldModel`; weights are drawn from a seed."""

    def facts(self) -> ModelFacts:
        """Describe it."""
        return ModelFacts(
            architecture="TinyDenoiser",
            num_parameters=sum(parameter.numel() for parameter in _Net().parameters()),
            num_layers=1,
            hidden_size=_HIDDEN,
            vocab_size=0,
            tokenizer_size=0,
            context_length=1000,
            stop_ids=frozenset(),
            pad_id=0,
        )

    def build(
        self,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout | None = None,  # noqa: ARG002 - one process builds it
    ) -> torch.nn.Module:
        """Draw the weights, so large that velocities are far from linear."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _Net()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(2.0)
        return module.to(dtype=dtype, device=device).eval()

    def encode(self, prompt: Prompt) -> Payload:
        """The text as numbers; `metadata` may ask for a given first frame."""
        if not isinstance(prompt.text, str):
            raise DataError("the prompt is a chat; give plain text")
        letters = np.frombuffer(prompt.text.encode().ljust(_WIDTH)[:_WIDTH], np.uint8) / 64.0 - 1.0
        arrays = {"text": _array(letters.astype(np.float32))}
        if prompt.metadata.get("num_given_frames"):
            given = np.zeros(_SHAPE, np.float32)
            given[:, 0] = letters[0]
            arrays |= {"given": _array(given), "is_given": _array(np.arange(_SHAPE[1]) < 1)}
        return Payload(kind="latents", arrays=arrays)

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """There are none."""
        raise DataError(f"the row {prompt.text!r} has no sample to imitate")

    def decode(self, payload: Payload) -> str:  # noqa: ARG002 - a sample has no text
        """Nothing."""
        return ""

    def latent_spec(self, prompt: Payload) -> LatentSpec:
        """The latents to denoise."""
        if "text" not in prompt.arrays:
            raise DataError(f"a prompt of the arrays {', '.join(prompt.arrays) or 'none'}, without `text`")
        if "given" not in prompt.arrays:
            return LatentSpec(shape=_SHAPE)
        return LatentSpec(shape=_SHAPE, given=_tensor(prompt, "given"), is_given_T=_tensor(prompt, "is_given"))

    def velocity(
        self,
        module: torch.nn.Module,
        latents_B: torch.Tensor,
        times_B: torch.Tensor,
        prompts: Sequence[Payload],
        *,
        guidance: float,
    ) -> torch.Tensor:
        """That of the text, led away from that of none."""
        texts_BE = torch.stack([_tensor(prompt, "text") for prompt in prompts]).to(latents_B.device)
        found: torch.Tensor = module(latents_B, times_B, texts_BE)
        if guidance != _GUIDANCE:
            without = module(latents_B, times_B, torch.zeros_like(texts_BE))
            found = without + guidance * (found - without)
        given_BT = torch.stack([_given(prompt) for prompt in prompts]).to(found.device)
        return found.masked_fill(given_BT[:, None, :, None, None], 0.0)

    @property
    def neutral_guidance(self) -> float:
        """The guidance at which the velocity is that of the prompt alone."""
        return _GUIDANCE

    def render(self, latents: torch.Tensor, prompt: Payload) -> Payload:  # noqa: ARG002 - the same for all
        """Channels as colours."""
        pixels = ((latents.clamp(-1.0, 1.0) + 1.0) * 127.5).to(torch.uint8).permute(1, 2, 3, 0)
        frames = np.ascontiguousarray(pixels.cpu().numpy())
        return Payload(kind="media", arrays={"frames": _array(frames), "fps": _array(np.array(8.0, np.float32))})

    def noised(self, payload: Payload, seed: int, *, num_decisions: int | None = None) -> Payload:
        """Points at even times; the seed is that of the noise."""
        number = num_decisions or 1
        times = (np.arange(number, dtype=np.float32) + 0.5) / number
        more = {"times": _array(times), "noise_seed": _array(np.array(seed, np.int64))}
        return attrs.evolve(payload, arrays={**payload.arrays, **more})

    def pack(
        self,
        payloads: Sequence[Payload],
        *,
        budget: int,
        multiple: int = 1,  # noqa: ARG002 - nothing is padded
        is_uniform: bool = False,  # noqa: ARG002 - likewise
    ) -> list[MicroBatch]:
        """Some decisions of one payload each, so that sequences are split where the budget is small."""
        return [
            batch for index, payload in enumerate(payloads) for batch in self._batches(index, payload, max(1, budget))
        ]

    def _batches(self, index: int, payload: Payload, budget: int) -> Iterator[MicroBatch]:
        if payload.kind != "latents" or "times" not in payload.arrays:
            raise DataError(f"payload {index} of kind {payload.kind!r} has no decisions of latents")
        inputs = _transitions(payload) if "states" in payload.arrays else _regressions(payload)
        total = len(inputs["times"])
        inputs["texts"] = _tensor(payload, "text").expand(total, -1)
        inputs["is_given"] = _given(payload).expand(total, -1)
        inputs["guidance"] = _tensor(payload, "guidance").expand(total)
        for first in range(0, total, budget):
            number = min(budget, total - first)
            yield MicroBatch(
                sequences=(index,),
                num_decisions=(number,),
                num_units=number,
                inputs={name: values[first : first + number] for name, values in inputs.items()},
                spans=(Span(first=first, total=total),),
            )

    def decide(
        self,
        module: torch.nn.Module,
        batch: MicroBatch,
        *,
        temperature: float,  # noqa: ARG002 - there is but one
        with_entropy: bool = False,  # noqa: ARG002 - not given
        prediction_for: Comparison | None = None,  # noqa: ARG002 - likewise
        kl_target: KLTarget | None = None,  # noqa: ARG002 - likewise
        with_features: bool = False,  # noqa: ARG002 - likewise
    ) -> Decided:
        """The log-probability of each x', and of a regression its negative error."""
        held = batch.inputs
        if not batch.num_units:
            return Decided(logprobs_N=torch.zeros(0), entropy_N=None)
        prompts = [
            Payload(kind="latents", arrays={"text": _array(text.numpy()), "is_given": _array(given.numpy())})
            for text, given in zip(held["texts"], held["is_given"], strict=True)
        ]
        guidance = float(held["guidance"][0])
        velocities_N = self.velocity(module, held["states"], held["times"], prompts, guidance=guidance)
        a_N, b_N, std_N = (each[:, None, None, None, None] for each in held["steps"].unbind(1))
        means_N = a_N * held["states"] + b_N * velocities_N + held["offsets"]
        densities_N = -0.5 * ((held["targets"] - means_N) / std_N) ** 2 - std_N.log() - 0.5 * math.log(2 * math.pi)
        values_N = torch.where(
            held["is_regression"][:, None, None, None, None], -((means_N - held["targets"]) ** 2), densities_N
        )
        kept_NT = ~held["is_given"]
        return Decided(logprobs_N=(values_N.mean((1, 3, 4)) * kept_NT).sum(1) / kept_NT.sum(1), entropy_N=None)

    def export(self, module: torch.nn.Module, directory: Path) -> None:
        """Nobody asks for it."""
        raise NotImplementedError

    def prepare(self, corpus: Iterable[str], tokenizer: Mapping[str, Any]) -> None:
        """There is nothing to make."""
        raise NotImplementedError


def _transitions(payload: Payload) -> dict[str, torch.Tensor]:
    states_M, places_N2 = _tensor(payload, "states"), _tensor(payload, "places").long()
    states_N = states_M[places_N2[:, 0]]
    return {
        "states": states_N,
        "targets": states_M[places_N2[:, 1]],
        "offsets": _tensor(payload, "offsets") if "offsets" in payload.arrays else torch.zeros_like(states_N),
        "times": _tensor(payload, "times"),
        "steps": _tensor(payload, "steps"),
        "is_regression": torch.zeros(len(states_N), dtype=torch.bool),
    }


def _regressions(payload: Payload) -> dict[str, torch.Tensor]:
    sample, times_N = _tensor(payload, "sample"), _tensor(payload, "times")
    seed, number = int(_tensor(payload, "noise_seed")), len(times_N)
    noises = [
        torch.randn(sample.shape, generator=torch.Generator().manual_seed(seed ^ decision))
        for decision in range(number)
    ]
    noise_N = torch.stack(noises) if noises else torch.zeros(0, *sample.shape)
    parts_N = times_N[:, None, None, None, None]
    noisy_N = (1 - parts_N) * sample + parts_N * noise_N
    return {
        "states": torch.where(_given(payload)[None, None, :, None, None], sample, noisy_N),
        "targets": noise_N - sample,
        "offsets": torch.zeros_like(noise_N),
        "times": times_N,
        "steps": torch.tensor([0.0, 1.0, 1.0]).expand(number, -1),
        "is_regression": torch.ones(number, dtype=torch.bool),
    }


def _given(payload: Payload) -> torch.Tensor:
    """The frames that are given, bool [T]."""
    return _tensor(payload, "is_given") if "is_given" in payload.arrays else torch.zeros(_SHAPE[1], dtype=torch.bool)


def _tensor(payload: Payload, name: str) -> torch.Tensor:
    held = payload.arrays[name]
    return torch.from_numpy(np.frombuffer(held.data, np.dtype(held.dtype)).reshape(held.shape).copy())


def _array(values: np.ndarray[tuple[int, ...], np.dtype[Any]]) -> Array:
    return Array(dtype=str(values.dtype), shape=values.shape, data=np.ascontiguousarray(values).tobytes())
