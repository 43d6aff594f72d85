"""Scores of decisions from velocities: log-probabilities, entropies, divergences, blends.

Everything is a mean over the dims that are decided, all but those of given frames, so that numbers do not grow with the
size of a video. A regression counts as normal around its velocity with variance 1/2: then its log-probability is, up
to a constant, the negative squared error that is given for it.

Source: FlowGRPO (arXiv:2505.05470, equations 9 to 12); DiffusionNFT (arXiv:2509.16117, equations 5 and 6).

Shape legend: N decisions, C channels, T latent frames, H and W latent height and width, K blends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch

from cosmos_core.errors import TrainingError
from cosmos_core.protocols import Decided
from cosmos_core.protocols.frozen import Blend, Blended, Comparison, Divergence, KLTarget

VELOCITY: Final = "velocity"
_HALF_LOG_TAU: Final = 0.5 * math.log(2 * math.pi)
_REGRESSION_STD: Final = math.sqrt(0.5)


class Decisions:
    """Decisions before their velocity is computed, of the inputs of a micro-batch (see `packing.pack`)."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.latents_N: Final = inputs["latents"]
        self.targets_N: Final = inputs["targets"]
        self.times_N: Final = inputs["times"]
        self.steps_N: Final = inputs["steps"]
        self.is_regression_N: Final = inputs["is_regression"]
        self.is_given_NT: Final = inputs["is_given"]

    def mean(self, values_N: torch.Tensor) -> torch.Tensor:
        """The mean [N] over decided dims of [N, C, T, H, W]."""
        per_frame_NT = values_N.mean((1, 3, 4))
        decided_NT = (~self.is_given_NT).to(per_frame_NT.dtype)
        return (per_frame_NT * decided_NT).sum(1) / decided_NT.sum(1)

    def decide(
        self,
        velocity_N: torch.Tensor,
        *,
        with_entropy: bool = False,
        prediction_for: Comparison | None = None,
        kl_target: KLTarget | None = None,
    ) -> Decided:
        """Score decisions by their velocities, float32 [N, C, T, H, W].

        With `prediction_for` the velocities are given, too: on the CPU, as those of a whole step are kept, of which
        each is as large as a video's latents.
        """
        std_N = torch.where(self.is_regression_N, torch.full_like(self.times_N, _REGRESSION_STD), self.steps_N[:, 2])
        divergence_N, blended = None, None
        if kl_target is not None:
            theirs_N = kl_target.prediction[VELOCITY].to(velocity_N.device)
            if isinstance(kl_target.comparison, Divergence):
                # Of two normals of the same variance, the same either way.
                divergence_N = 0.5 * (self.steps_N[:, 1] / std_N) ** 2 * self.mean((velocity_N - theirs_N) ** 2)
            else:
                blended = self.blended(kl_target.comparison, velocity_N, theirs_N)
        return Decided(
            logprobs_N=self.logprobs(velocity_N),
            # Of the normal distributions, for one dim.
            entropy_N=(std_N.log() + _HALF_LOG_TAU + 0.5).detach() if with_entropy else None,
            prediction=None if prediction_for is None else {VELOCITY: velocity_N.detach().cpu()},
            divergence_N=divergence_N,
            blended=blended,
        )

    def logprobs(self, velocity_N: torch.Tensor) -> torch.Tensor:
        """float32 [N]: of transitions the log-density, of regressions the negative squared error."""
        a_N, b_N, std_N = self.steps_N.unbind(1)
        errors_N = self.mean((self.targets_N - (_each(a_N) * self.latents_N + _each(b_N) * velocity_N)) ** 2)
        density_N = -errors_N / (2 * std_N**2) - std_N.log() - _HALF_LOG_TAU
        return torch.where(self.is_regression_N, -errors_N, density_N)

    def blended(self, blend: Blend, velocity_N: torch.Tensor, other_N: torch.Tensor) -> Blended:
        """Distances of the samples that blends stand for from the true ones.

        Raises:
            TrainingError: A decision is no regression, so there is no true one.
        """
        if not bool(self.is_regression_N.all()):
            raise TrainingError("blends are of regressions, and a micro-batch has transitions; train on samples alone")
        squared, absolute = [], []
        for share in blend.shares:
            # x_t - t v - x_0, since x_t - t (e - x_0) is x_0.
            error_N = _each(self.times_N) * (self.targets_N - (share * velocity_N + (1 - share) * other_N))
            squared.append(self.mean(error_N**2))
            absolute.append(self.mean(error_N.detach().abs()))
        return Blended(squared_NK=torch.stack(squared, 1), absolute_NK=torch.stack(absolute, 1))


def _each(values_N: torch.Tensor) -> torch.Tensor:
    return values_N[:, None, None, None, None]
