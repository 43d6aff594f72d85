"""The SDE whose marginals are those of the flow's ODE, by steps of Euler and Maruyama.

Source: arXiv:2505.05470, section 4 (from ODE to SDE), with σ_t = a sqrt(t / (1 - t)).

Deviation: in the first step, 1 - t is taken at the time of the second, whatever the first time is. At t = 1 σ_t would
be infinite, and there the authors' code does the same; just below 1, where it does not, the step would add more noise
than there is.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import attrs

from cosmos_core.rollout.diffusion.samplers.euler import euler_step
from cosmos_core.rollout.diffusion.samplers.step import Course, Step, row
from cosmos_core.rollout.diffusion.samplers.times import shifted


@attrs.frozen(kw_only=True)
class FlowSde:
    """FlowGRPO's sampler.

    Attributes:
        shift: Of the times.
        noise_level: a.
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
            self._step(times[index], times[index + 1], times[1]) if index in noisy else euler_step(*times[index:][:2])
            for index in range(num_steps)
        ]
        return Course(start=1.0, steps=tuple(steps))

    def _step(self, time: float, following: float, second: float) -> Step:
        length = time - following
        variance = self.noise_level**2 * time / (1.0 - min(time, second))
        half = variance / (2.0 * time) * length
        return Step(time=time, mean=row(1.0 - half, -length - half * (1.0 - time)), std=math.sqrt(variance * length))
