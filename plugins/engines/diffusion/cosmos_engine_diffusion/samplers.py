"""Samplers of flow models: their steps as numbers, their times, and those of one step (Euler, SDE, CPS).

Every sampler here is linear in states and velocities, plus noise:
x' = a x + b v(x, t) + Σ o_k m_k + std z, where the m_k are tensors that earlier steps left; what this one leaves is
linear in x, v and m as well. So an engine needs to know nothing of a sampler but such rows, and who trains on a step
nothing but a, b, std and the sum of the o_k m_k.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Final, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

Row: TypeAlias = npt.NDArray[np.float64]
"""Weights of x, v, m_1, …, m_K, float64 [2 + K]."""


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """One step: from x at `time` to x' at the time of the next step, or at 0.

    Attributes:
        time: t of x, at which the velocity is evaluated.
        mean: Weights of x, v and the history in the mean of x'.
        std: Standard deviation of x'; 0 where x' is its mean.
        kept: The same weights in each tensor of the history after the step.
    """

    time: float
    mean: Row
    std: float = 0.0
    kept: tuple[Row, ...] = ()

    @property
    def of_state(self) -> float:
        """a, the coefficient of x."""
        return float(self.mean[0])

    @property
    def of_velocity(self) -> float:
        """b, the coefficient of v."""
        return float(self.mean[1])


@attrs.frozen(kw_only=True, eq=False)
class Discretization:
    """All steps from noise to data.

    Attributes:
        start: Standard deviation of the first state.
        steps: The steps, in order.
    """

    start: float
    steps: tuple[Step, ...]


class Sampler(Protocol):
    """A way from noise to data; samplers that are equal lead the same way."""

    def __hash__(self) -> int:
        """The hash of what the sampler is made with."""
        ...

    def num_noisy(self, num_steps: int) -> int:
        """Number of the first of `num_steps` steps that may be noisy; 0 for one that follows an ODE."""
        ...

    def discretize(self, num_steps: int, noisy: Collection[int]) -> Discretization:
        """The steps.

        Args:
            num_steps: Velocities that are evaluated, 1 at least.
            noisy: Which steps are, each below `num_noisy`; the others follow the ODE.
        """
        ...


def row(of_state: float, of_velocity: float, history: Sequence[float] = ()) -> Row:
    """The weights of x, v and the history."""
    return np.array([of_state, of_velocity, *history])


def clean(time: float, num_history: int = 0) -> Row:
    """The row of x_0 as the velocity at `time` predicts it: x - t v."""
    return row(1.0, -time, [0.0] * num_history)


RHO: Final = 7.0


def shifted(num_steps: int, shift: float) -> list[float]:
    """Evenly spaced from 1 to 1/n, then moved towards noise: t ← s t / (1 + (s - 1) t).

    Source: arXiv:2403.03206, equation 23.
    """
    return _shift(np.linspace(1.0, 1.0 / num_steps, num_steps), shift)


def unipc_shifted(num_steps: int, shift: float) -> list[float]:
    """Times as those of `shifted`, of n + 1 points from 1 to 1/1000 but the last; the first a little below 1.

    These are the times of the UniPC scheduler of diffusers for flow models: at 1, the signal-to-noise ratio that it
    computes with would be 0.
    """
    times = _shift(np.linspace(1.0, 1.0 / 1000, num_steps + 1)[:-1], shift)
    return [min(times[0], 1.0 - 1e-6), *times[1:]]


def karras(num_steps: int, sigma_max: float, sigma_min: float) -> list[float]:
    """Evenly spaced in σ^(1/7) from `sigma_max` to `sigma_min`, where t = σ / (1 + σ).

    Source: arXiv:2206.00364, equation 5.
    """
    if num_steps == 1:
        sigmas = np.array([sigma_max])
    else:
        sigmas = np.linspace(sigma_max ** (1 / RHO), sigma_min ** (1 / RHO), num_steps) ** RHO
    return [float(each) for each in sigmas / (1.0 + sigmas)]


def _shift(times: np.ndarray[tuple[int, ...], np.dtype[np.float64]], shift: float) -> list[float]:
    return [float(each) for each in shift * times / (1.0 + (shift - 1.0) * times)]


@attrs.frozen(kw_only=True)
class Euler:
    """Euler's method on the flow's ODE, x' = x + v dt (source: arXiv:2209.03003; arXiv:2210.02747)."""

    shift: float

    def num_noisy(self, num_steps: int) -> int:  # noqa: ARG002 - of a `Sampler`
        """None."""
        return 0

    def discretize(self, num_steps: int, noisy: Collection[int]) -> Discretization:
        """The steps; none is noisy."""
        assert not noisy
        times = [*shifted(num_steps, self.shift), 0.0]
        steps = [euler_step(times[index], times[index + 1]) for index in range(num_steps)]
        return Discretization(start=1.0, steps=tuple(steps))


def euler_step(time: float, following: float) -> Step:
    """Along the ODE from one time to another."""
    return Step(time=time, mean=row(1.0, following - time))


@attrs.frozen(kw_only=True)
class _Noisy(ABC):
    """Steps of which those that are not noisy are Euler's.

    Attributes:
        shift: Of the times.
        noise_level: a.
    """

    shift: float
    noise_level: float

    def num_noisy(self, num_steps: int) -> int:
        """All but the last, which leads to data."""
        return num_steps - 1

    def discretize(self, num_steps: int, noisy: Collection[int]) -> Discretization:
        """The steps; those that are not noisy are Euler's."""
        times = [*shifted(num_steps, self.shift), 0.0]
        steps = [
            self._step(*pair, times[1]) if index in noisy else euler_step(*pair)
            for index, pair in enumerate(itertools.pairwise(times))
        ]
        return Discretization(start=1.0, steps=tuple(steps))

    @abstractmethod
    def _step(self, time: float, following: float, second: float) -> Step:
        """A noisy step; `second` is the time of the second one of all."""


@attrs.frozen(kw_only=True)
class FlowSde(_Noisy):
    """FlowGRPO's sampler: the SDE whose marginals are those of the flow's ODE, by steps of Euler and Maruyama.

    Source: arXiv:2505.05470, section 4 (from ODE to SDE), with σ_t = a sqrt(t / (1 - t)).

    Deviation: in the first step, 1 - t is taken at the time of the second, whatever the first time is. At t = 1 σ_t
    would be infinite, and there the authors' code does the same; just below 1, where it does not, the step would add
    more noise than there is.
    """

    def _step(self, time: float, following: float, second: float) -> Step:
        length = time - following
        variance = self.noise_level**2 * time / (1.0 - min(time, second))
        half = variance / (2.0 * time) * length
        return Step(time=time, mean=row(1.0 - half, -length - half * (1.0 - time)), std=math.sqrt(variance * length))


@attrs.frozen(kw_only=True)
class Cps(_Noisy):
    """Coefficients-preserving sampling: part of the noise that the velocity predicts is replaced by fresh noise.

    x' = (1 - t') x̂_0 + sqrt(t'² - std²) ê + std z with std = t' sin(a π/2): x' has as much of data and of noise as x_t'
    has (source: arXiv:2509.05952).

    Deviation: the authors take -|x' - mean|² for the log-probability; here it is that of the Gaussian, as of every
    sampler. The noise level a is at most 1: the share of fresh noise is sin(a π/2).
    """

    def _step(self, time: float, following: float, second: float) -> Step:  # noqa: ARG002 - of the base class
        angle = self.noise_level * math.pi / 2.0
        left = following * math.cos(angle)
        # x̂_0 = x - t v and ê = x + (1 - t) v.
        mean = row(1.0 - following + left, left * (1.0 - time) - (1.0 - following) * time)
        return Step(time=time, mean=mean, std=following * math.sin(angle))
