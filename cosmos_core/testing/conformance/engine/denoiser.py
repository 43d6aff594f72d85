"""A world model, as small as one can be: each place of a latent frame is denoised by itself, knowing time and text.

Shape legend: B latents of a batch, N decisions of a micro-batch, S sequences of it, T latent frames, E width of a
text's embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion import packing
from cosmos_core.models.diffusion.arrays import payload_of, with_tensors
from cosmos_core.models.diffusion.packing import Decisions
from cosmos_core.protocols import Decided, MicroBatch, ModelFacts
from cosmos_core.protocols.world import LatentSpec
from cosmos_core.testing.conformance.engine.subject import tensor_of
from cosmos_core.types import Payload, Prompt

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

    def build(self, *, seed: int, dtype: torch.dtype, device: torch.device, **_: Any) -> torch.nn.Module:
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
        text_E = torch.tensor(list(prompt.text.encode().ljust(_WIDTH)[:_WIDTH])) / 64.0 - 1.0
        if not prompt.metadata.get("num_given_frames"):
            return payload_of({"text": text_E})
        given = torch.zeros(_SHAPE)
        given[:, 0] = text_E[0]
        return payload_of({"text": text_E, "given": given, "is_given": torch.arange(_SHAPE[1]) < 1})

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
        return LatentSpec(shape=_SHAPE, given=tensor_of(prompt, "given"), is_given_T=_given(prompt))

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
        texts_BE = torch.stack([_text(prompt)["text"] for prompt in prompts]).to(latents_B.device)
        given_BT = torch.stack([_given(prompt) for prompt in prompts]).to(latents_B.device)
        found = _velocity(module, latents_B, times_B, texts_BE, guidance)
        return found.masked_fill(given_BT[:, None, :, None, None], 0.0)

    @property
    def neutral_guidance(self) -> float:
        """The guidance at which the velocity is that of the prompt alone."""
        return _GUIDANCE

    def render(self, latents: torch.Tensor, prompt: Payload) -> Payload:  # noqa: ARG002 - the same for all
        """Channels as colours."""
        pixels = ((latents.clamp(-1.0, 1.0) + 1.0) * 127.5).to(torch.uint8).permute(1, 2, 3, 0)
        return payload_of({"frames": pixels, "fps": torch.tensor(8.0)}, "media")

    def noised(self, payload: Payload, seed: int, *, num_decisions: int | None = None) -> Payload:
        """Points at even times; the seed is that of the noise."""
        number = num_decisions or 1
        return with_tensors(payload, {"times": (torch.arange(number) + 0.5) / number, "noise_seed": torch.tensor(seed)})

    def pack(self, payloads: Sequence[Payload], *, budget: int, **_: Any) -> list[MicroBatch]:
        """Decisions as trainers of world models lay them out."""
        return packing.pack(payloads, _SHAPE, _text, budget=budget, neutral_guidance=_GUIDANCE)

    def decide(self, module: torch.nn.Module, batch: MicroBatch, **_: Any) -> Decided:
        """The log-probability of each x', and of a regression its negative error."""
        if not batch.num_units:
            return Decided(logprobs_N=torch.zeros(0), entropy_N=None)
        held, decisions = batch.inputs, Decisions(batch.inputs)
        text_SE, rows_N = held[f"{packing.CONDITION}text"], held["rows"]
        texts_NE = text_SE[rows_N] if len(text_SE) > 1 else text_SE.expand(len(rows_N), -1)
        guidance_N = held["guidance"][:, None, None, None, None]
        velocities_N = _velocity(module, decisions.latents_N, decisions.times_N, texts_NE, guidance_N)
        return decisions.decide(velocities_N)

    def export(self, module: torch.nn.Module, directory: Path) -> None:
        """Nobody asks for it."""
        raise NotImplementedError

    def prepare(self, corpus: Iterable[str], tokenizer: Mapping[str, Any]) -> None:
        """There is nothing to make."""
        raise NotImplementedError


def _velocity(
    module: torch.nn.Module,
    latents_B: torch.Tensor,
    times_B: torch.Tensor,
    texts_BE: torch.Tensor,
    guidance: float | torch.Tensor,
) -> torch.Tensor:
    found, without = (module(latents_B, times_B, each_BE) for each_BE in (texts_BE, torch.zeros_like(texts_BE)))
    guided: torch.Tensor = without + guidance * (found - without)
    return guided


def _text(prompt: Payload) -> dict[str, torch.Tensor]:
    return {"text": tensor_of(prompt, "text")}


def _given(payload: Payload) -> torch.Tensor:
    return tensor_of(payload, "is_given") if "is_given" in payload.arrays else torch.zeros(_SHAPE[1], dtype=torch.bool)
