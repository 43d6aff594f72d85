"""Additions of model plugins for world models: engines denoise with them, and they train on what engines record.

Time t runs from 1 (noise) to 0 (data): x_t = (1 - t) x_0 + t e with e standard normal, and the velocity is e - x_0
(flow matching, arXiv:2210.02747; rectified flow, arXiv:2209.03003).

A decision is one of two kinds. A *transition* leads from x_t to x' with noise: x' is normal around
μ = a x_t + b v(x_t, t) + offset, with one standard deviation; samplers differ in a, b and it alone, so that who trains
on a transition need not know the sampler. A *regression* is a point at which the velocity towards a sample is learned:
x_t of a drawn t and e, whose target is e - x_0.

Shape legend: B latents of a batch, N decisions of a payload, M states that it keeps, C channels, T latent frames,
H and W latent height and width, L tokens of the text, E their width, F frames of a video.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from cosmos_core.types import Payload

if TYPE_CHECKING:
    import torch

DecisionKind: TypeAlias = Literal["transitions", "regressions"]


@attrs.frozen(kw_only=True, eq=False)
class LatentSpec:
    """The latents that a prompt asks to be denoised.

    Attributes:
        shape: (C, T, H, W) of the latents.
        given: float32 [C, T, H, W], latents of frames that the prompt gives; None where it gives none.
        is_given_T: bool [T], which frames these are; None likewise. They stay as they are, and decide nothing.
    """

    shape: tuple[int, int, int, int]
    given: torch.Tensor | None = None
    is_given_T: torch.Tensor | None = None

    def with_given(self, state: torch.Tensor) -> torch.Tensor:
        """Put the given frames in their places in a state [..., C, T, H, W], on its device."""
        if self.given is None or self.is_given_T is None:
            return state
        return self.given.to(state.device).where(self.is_given_T.to(state.device)[None, :, None, None], state)


@runtime_checkable
class WorldModel(Protocol):
    """A model that turns noise into latents, and learns from samples by regressions. Optional, beside `Model`.

    `Model.encode` gives a payload of kind `latents` with what conditions the denoising; the arrays that an engine adds
    are told in `cosmos_core.types.Payload`. `pack` takes payloads with decisions of either kind.
    """

    def latent_spec(self, prompt: Payload) -> LatentSpec:
        """Describe the latents to denoise. Needs no weights.

        Raises:
            DataError: The arrays of the payload do not fit the model.
        """

    def velocity(
        self,
        module: torch.nn.Module,
        latents_B: torch.Tensor,
        times_B: torch.Tensor,
        prompts: Sequence[Payload],
        *,
        guidance: float,
    ) -> torch.Tensor:
        """The velocity at each latent. Hides how the family scales time, guides, conditions and parametrises.

        Args:
            module: The weights.
            latents_B: float32 [B, C, T, H, W].
            times_B: float32 [B], in [0, 1].
            prompts: B conditionings, as `encode` gave them.
            guidance: Scale of classifier-free guidance in the formula of the family's own pipeline, at every value,
                also at those where the pipeline uses none; at `neutral_guidance` one forward is enough.

        Returns:
            float32 [B, C, T, H, W]; of frames that are given, zero.
        """

    @property
    def neutral_guidance(self) -> float:
        """The guidance at which the velocity is that of the prompt alone."""

    def render(self, latents: torch.Tensor, prompt: Payload) -> Payload:
        """Decode latents into frames, where the latents are.

        Args:
            latents: float32 [C, T, H, W], at t = 0.
            prompt: What they were denoised for; of kind `latents`, without arrays where that is not known.

        Returns:
            A payload of kind `media`: `frames` uint8 [F, height, width, 3] (RGB; an image is one) and `fps` float32 [].
        """

    def noised(self, payload: Payload, seed: int, *, num_decisions: int | None = None) -> Payload:
        """A payload with a `sample`, a demonstration's or a generated one, and the points at which it is learned.

        Deterministic in its arguments; drawn anew for each seed, that is each time a row is trained on.

        Args:
            payload: Has `sample` (see `cosmos_core.types.Payload`).
            seed: Of the times, and of the noise.
            num_decisions: Of how many points; None for as many as the model's options say.

        Returns:
            The same with `times` [N] and `noise_seed`.
        """
