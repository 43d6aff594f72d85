"""EDM's 2ab: a second-order Adams-Bashforth method in -log σ on predictions of x_0, with churn.

It is stated in EDM's terms, x_EDM = x_0 + σ e. With t = σ / (1 + σ), x = (1 - t) x_EDM is the state of a flow, and
x_0 = x - t v. Noise that opens a step ("churn", arXiv:2206.00364, algorithm 2, lines 4 to 6) belongs to the step
before it here: that one leads to x' at the raised σ, normal around where the method leads to. The first σ is raised
with that of the second step. Before the last step, a denoise from the smallest σ to data, there is no noise.

Source: arXiv:2308.02157 for the method, a multistep of its second order whose other point is that of the step before;
arXiv:2206.00364 for the times and the churn. The first step is Euler's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

import attrs

from cosmos_core.rollout.diffusion.samplers.step import Course, Step, clean, row
from cosmos_core.rollout.diffusion.samplers.times import karras

_LEAST_STEP: Final = 1e-3
"""Of log σ, between two predictions that a line is drawn through."""


@attrs.frozen(kw_only=True)
class Edm:
    """EDM's 2ab.

    Attributes:
        sigma_max: σ of the first step.
        sigma_min: σ of the last step, which leads to data.
        churn: By how much a noisy step raises the σ that it leads to, as a share of it: S_churn / n of EDM, which is
            at most sqrt(2) - 1 there.
    """

    sigma_max: float
    sigma_min: float
    churn: float

    def num_noisy(self, num_steps: int) -> int:
        """All but the last two."""
        return max(0, num_steps - 2)

    def course(self, num_steps: int, noisy: Collection[int]) -> Course:
        """The steps."""
        nominal = [time / (1.0 - time) for time in karras(num_steps, self.sigma_max, self.sigma_min)]
        is_raised = [max(0, index - 1) in noisy for index in range(num_steps)]
        raised = [sigma * (1.0 + self.churn * up) for sigma, up in zip(nominal, is_raised, strict=True)]
        steps = [self._step(index, nominal, raised) for index in range(num_steps)]
        return Course(start=steps[0].time, steps=tuple(steps))

    @staticmethod
    def _step(index: int, nominal: Sequence[float], raised: Sequence[float]) -> Step:
        """One step; what is remembered is the prediction of x_0 of the step before."""
        sigma, time = raised[index], raised[index] / (1.0 + raised[index])
        remembered = [0.0] if index else []
        predicted = clean(time, len(remembered))
        if index == len(nominal) - 1:
            return Step(time=time, mean=predicted)
        target, reached = nominal[index + 1], raised[index + 1]
        length = math.log(sigma / target)
        # Weights of this prediction and of the one before: the integral of their line, or constant, over the step.
        whole = -math.expm1(-length)
        before = math.log(raised[index - 1] / sigma) if index else 0.0
        # Churn may lead back to where the step before was: one prediction says no slope then.
        slope = (length - whole) / before if before > _LEAST_STEP else 0.0
        mean = row(target / sigma * (1.0 + sigma), 0.0, remembered) + (whole + slope) * predicted
        mean -= row(0.0, 0.0, [slope] if index else [])
        scale = 1.0 / (1.0 + reached)
        return Step(time=time, mean=scale * mean, std=scale * math.sqrt(reached**2 - target**2), kept=(predicted,))
