"""Multistep samplers: EDM's 2ab and UniPC, which remember predictions of earlier steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

import attrs
import numpy as np

from cosmos_engine_diffusion.samplers import Discretization, Row, Step, clean, karras, row, unipc_shifted

_LEAST_STEP: Final = 1e-3
"""Of log σ, between two predictions that a line is drawn through."""


@attrs.frozen(kw_only=True)
class Edm:
    """EDM's 2ab: a second-order Adams-Bashforth method in -log σ on predictions of x_0, with churn.

    It is stated in EDM's terms, x_EDM = x_0 + σ e. With t = σ / (1 + σ), x = (1 - t) x_EDM is the state of a flow, and
    x_0 = x - t v. Noise that opens a step ("churn", arXiv:2206.00364, algorithm 2, lines 4 to 6) belongs to the step
    before it here: that one leads to x' at the raised σ, normal around where the method leads to. The first σ is raised
    with that of the second step. Before the last step, a denoise from the smallest σ to data, there is no noise.

    Source: arXiv:2308.02157 for the method, a multistep of its second order whose other point is that of the step
    before; arXiv:2206.00364 for the times and the churn. The first step is Euler's.

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

    def discretize(self, num_steps: int, noisy: Collection[int]) -> Discretization:
        """The steps."""
        nominal = [time / (1.0 - time) for time in karras(num_steps, self.sigma_max, self.sigma_min)]
        is_raised = [max(0, index - 1) in noisy for index in range(num_steps)]
        raised = [sigma * (1.0 + self.churn * up) for sigma, up in zip(nominal, is_raised, strict=True)]
        steps = [self._step(index, nominal, raised) for index in range(num_steps)]
        return Discretization(start=steps[0].time, steps=tuple(steps))

    @staticmethod
    def _step(index: int, nominal: Sequence[float], raised: Sequence[float]) -> Step:
        """One step; the history is the prediction of x_0 of the step before."""
        sigma, time = raised[index], raised[index] / (1.0 + raised[index])
        history = [0.0] if index else []
        predicted = clean(time, len(history))
        if index == len(nominal) - 1:
            return Step(time=time, mean=predicted)
        target, reached = nominal[index + 1], raised[index + 1]
        length = math.log(sigma / target)
        # Weights of this prediction and of the one before: the integral of their line, or constant, over the step.
        whole = -math.expm1(-length)
        before = math.log(raised[index - 1] / sigma) if index else 0.0
        # Churn may lead back to where the step before was: one prediction says no slope then.
        slope = (length - whole) / before if before > _LEAST_STEP else 0.0
        mean = row(target / sigma * (1.0 + sigma), 0.0, history) + (whole + slope) * predicted
        mean -= row(0.0, 0.0, [slope] if index else [])
        scale = 1.0 / (1.0 + reached)
        return Step(time=time, mean=scale * mean, std=scale * math.sqrt(reached**2 - target**2), kept=(predicted,))


_ORDER = 2


@attrs.frozen(kw_only=True)
class UniPc:
    """UniPC of second order: a predictor, and a corrector that uses the velocity the next step evaluates anyway.

    Source: arXiv:2302.04867, with B(h) = e^h - 1 (bh2) on predictions of x_0. As in diffusers, the first and the last
    step are of first order. It follows the ODE. The history is c, the corrected state that the last step started from,
    and m_1 and m_2, the predictions of x_0 of the last step and of the one before.

    Attributes:
        shift: Of the times.
        sigmas: (largest, smallest) σ, where the times are Karras' instead.
    """

    shift: float
    sigmas: tuple[float, float] | None = None

    def num_noisy(self, num_steps: int) -> int:  # noqa: ARG002 - of a `Sampler`
        """None."""
        return 0

    def discretize(self, num_steps: int, noisy: Collection[int]) -> Discretization:
        """The steps; none is noisy."""
        assert not noisy
        times = unipc_shifted(num_steps, self.shift) if self.sigmas is None else karras(num_steps, *self.sigmas)
        return Discretization(start=1.0, steps=tuple(_step(index, times) for index in range(num_steps)))


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
    """The order of the predictor of a step, and of the corrector that follows it."""
    return min(_ORDER, num_steps - index, index + 1)


def _predict(state: Row, predictions: Sequence[Row], times: Sequence[float], following: float, order: int) -> Row:
    """Step on from `state` at the last of `times`, with the predictions of the last steps, newest first."""
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
