"""Coefficients-preserving sampling: part of the noise that the velocity predicts is replaced by fresh noise.

x' = (1 - t') x̂_0 + sqrt(t'² - std²) ê + std z with std = t' sin(a π/2): x' has as much of data and of noise as x_t'
has (source: arXiv:2509.05952).

Deviation: the authors take -|x' - mean|² for the log-probability; here it is that of the Gaussian, as of every sampler.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import attrs

from cosmos_core.rollout.diffusion.samplers.euler import euler_step
from cosmos_core.rollout.diffusion.samplers.step import Course, Step, row
from cosmos_core.rollout.diffusion.samplers.times import shifted


@attrs.frozen(kw_only=True)
class Cps:
    """Coefficients-preserving sampling.

    Attributes:
        shift: Of the times.
        noise_level: a, at most 1: the share of fresh noise is sin(a π/2).
    """

    shift: float
    noise_level: float

    def num_noisy(self, num_steps: int) -> int:
        """All but the last, which leads to data."""
        return num_steps - 1

    def course(self, num_steps: int, noisy: Collection[int]) -> Course:
        """The steps; those that are not noisy are Euler's."""
        times = [*shifted(num_steps, self.shift), 0.0]
        steps = [
            self._step(times[index], times[index + 1]) if index in noisy else euler_step(*times[index:][:2])
            for index in range(num_steps)
        ]
        return Course(start=1.0, steps=tuple(steps))

    def _step(self, time: float, following: float) -> Step:
        angle = self.noise_level * math.pi / 2.0
        left = following * math.cos(angle)
        # x̂_0 = x - t v and ê = x + (1 - t) v.
        mean = row(1.0 - following + left, left * (1.0 - time) - (1.0 - following) * time)
        return Step(time=time, mean=mean, std=following * math.sin(angle))
