"""Euler's method on the flow's ODE: x' = x + v dt."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from cosmos_core.rollout.diffusion.samplers.step import Course, Step, row
from cosmos_core.rollout.diffusion.samplers.times import shifted


@attrs.frozen(kw_only=True)
class Euler:
    """Euler's method (source: arXiv:2209.03003; arXiv:2210.02747).

    Attributes:
        shift: Of the times.
    """

    shift: float

    def num_noisy(self, num_steps: int) -> int:  # noqa: ARG002 - of a `Sampler`
        """None."""
        return 0

    def course(self, num_steps: int, noisy: Collection[int]) -> Course:
        """The steps; none is noisy."""
        assert not noisy
        times = [*shifted(num_steps, self.shift), 0.0]
        steps = [euler_step(times[index], times[index + 1]) for index in range(num_steps)]
        return Course(start=1.0, steps=tuple(steps))


def euler_step(time: float, following: float) -> Step:
    """Along the ODE from one time to another."""
    return Step(time=time, mean=row(1.0, following - time))
