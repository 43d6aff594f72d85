"""One step of a sampler, as numbers: every sampler here is linear in states and velocities, plus noise.

x' = a x + b v(x, t) + Σ o_k m_k + std z, where the m_k are tensors that earlier steps left; what this one leaves is
linear in x, v and m as well. So an engine needs to know nothing of a sampler but such rows, and who trains on a step
nothing but a, b, std and the sum of the o_k m_k.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

Row: TypeAlias = npt.NDArray[np.float64]
"""Weights of x, v, m_1, …, m_K, float64 [2 + K]."""


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """From x at `time` to x' at the time of the next step, or at 0.

    Attributes:
        time: t of x, at which the velocity is evaluated.
        mean: Weights of x, v and what is remembered in the mean of x'.
        std: Standard deviation of x'; 0 where x' is its mean.
        kept: The same weights in each tensor that is remembered after the step.
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
class Course:
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
        """Of what it is made with."""
        ...

    def num_noisy(self, num_steps: int) -> int:
        """How many of the first steps of so many may be noisy; 0 of what follows an ODE."""
        ...

    def course(self, num_steps: int, noisy: Collection[int]) -> Course:
        """The steps.

        Args:
            num_steps: Velocities that are evaluated, 1 at least.
            noisy: Which steps are, each below `num_noisy`; the others follow the ODE.
        """
        ...


X: Final[Row] = np.array([1.0, 0.0])
"""The row that is x itself, where nothing is remembered."""


def row(of_state: float, of_velocity: float, remembered: Sequence[float] = ()) -> Row:
    """The weights of x, v and what is remembered."""
    return np.array([of_state, of_velocity, *remembered])


def clean(time: float, num_remembered: int = 0) -> Row:
    """The row of x_0 as the velocity at `time` predicts it: x - t v."""
    return row(1.0, -time, [0.0] * num_remembered)
