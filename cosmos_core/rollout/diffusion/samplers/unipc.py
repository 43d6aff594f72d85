"""UniPC of second order: a predictor, and a corrector that uses the velocity the next step evaluates anyway.

Source: arXiv:2302.04867, with B(h) = e^h - 1 (bh2) on predictions of x_0. As in diffusers, the first and the last step
are of first order. It follows the ODE.

Shape legend: what is remembered is c, the corrected state that the last step started from, and the predictions of x_0
of the last step and of the one before, m_1 and m_2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import attrs
import numpy as np

from cosmos_core.rollout.diffusion.samplers.step import Course, Row, Step
from cosmos_core.rollout.diffusion.samplers.times import karras, unipc_shifted

_ORDER = 2


@attrs.frozen(kw_only=True)
class UniPc:
    """UniPC of second order.

    Attributes:
        shift: Of the times.
        sigmas: (largest, smallest) σ, where the times are Karras' instead.
    """

    shift: float
    sigmas: tuple[float, float] | None = None

    def num_noisy(self, num_steps: int) -> int:  # noqa: ARG002 - of a `Sampler`
        """None."""
        return 0

    def course(self, num_steps: int, noisy: Collection[int]) -> Course:
        """The steps; none is noisy."""
        assert not noisy
        times = unipc_shifted(num_steps, self.shift) if self.sigmas is None else karras(num_steps, *self.sigmas)
        return Course(start=1.0, steps=tuple(_step(index, times) for index in range(num_steps)))


def _step(index: int, times: Sequence[float]) -> Step:
    time, num_steps = times[index], len(times)
    # Basis: x, v and what the steps before have left.
    basis = np.eye(2 + min(index, 1) + min(index, _ORDER))
    state, velocity, *left = basis
    now = state - time * velocity
    corrected, predicted = (left[0], left[1:]) if index else (state, [])
    if index:
        corrected = _correct(corrected, [now, *predicted], times[: index + 1], order=_order(index - 1, num_steps))
    predictions = [now, *predicted]
    mean = _predict(corrected, predictions, [*times[: index + 1]], [*times, 0.0][index + 1], _order(index, num_steps))
    return Step(time=time, mean=mean, kept=(corrected, *predictions[:_ORDER]))


def _order(index: int, num_steps: int) -> int:
    """Of the predictor of a step, and of the corrector that follows it."""
    return min(_ORDER, num_steps - index, index + 1)


def _predict(state: Row, predictions: Sequence[Row], times: Sequence[float], following: float, order: int) -> Row:
    """From `state` at the last of `times`, with the predictions of the last steps, newest first."""
    newest = predictions[0]
    if following == 0.0:
        return newest
    length = _log_snr(following) - _log_snr(times[-1])
    share = math.expm1(-length)
    mean = following / times[-1] * state - (1.0 - following) * share * newest
    if order == 1:
        return mean
    ratio = (_log_snr(times[-2]) - _log_snr(times[-1])) / length
    return mean - (1.0 - following) * share * 0.5 * (predictions[1] - newest) / ratio


def _correct(start: Row, predictions: Sequence[Row], times: Sequence[float], *, order: int) -> Row:
    """The state at the last of `times`, from `start` one step before, now that it has a prediction itself."""
    now, last, *older = predictions
    following, begin = times[-1], times[-2]
    length = _log_snr(following) - _log_snr(begin)
    share = math.expm1(-length)
    mean = following / begin * start - (1.0 - following) * share * last
    if order == 1:
        return mean - (1.0 - following) * share * 0.5 * (now - last)
    ratio = (_log_snr(times[-3]) - _log_snr(begin)) / length
    # φ_2 and φ_3 of the paper, at -h and over B(h).
    second = share / -length - 1.0
    third = second / -length - 0.5
    weights = np.linalg.solve(np.array([[1.0, 1.0], [ratio, 1.0]]), np.array([second, 2.0 * third]) / share)
    change: Row = weights[0] * (older[0] - last) / ratio + weights[1] * (now - last)
    return mean - (1.0 - following) * share * change


def _log_snr(time: float) -> float:
    """λ = log((1 - t) / t)."""
    return math.log1p(-time) - math.log(time)
