"""Follows a discretization of steps with any velocity, in float64."""

import numpy as np


def follow(discretization, state, velocity, noise=None):
    """All states from the first to the last; `noise(index)` is drawn where a step has any."""
    states, history = [state], []
    for index, step in enumerate(discretization.steps):
        basis = [state, velocity(state, step.time), *history]
        assert len(step.mean) == len(basis)
        history = [sum(w * each for w, each in zip(row, basis, strict=True)) for row in step.kept]
        state = sum(w * each for w, each in zip(step.mean, basis, strict=True))
        if step.std and noise is not None:
            state = state + step.std * noise(index)
        states.append(state)
    return states


def curved(state, time):
    """A velocity that is linear in nothing."""
    return np.tanh(state) * (1.3 - time) + 0.3 * state * time - 0.2


class Gaussian:
    """x_0 is normal: the marginal of x_t is known, and the velocity E[e - x_0 | x_t] is linear in x."""

    def __init__(self, mean=0.8, std=0.3):
        self.mean, self.std = mean, std

    def marginal(self, time):
        return (1 - time) * self.mean, (1 - time) ** 2 * self.std**2 + time**2

    def slope(self, time):
        _, variance = self.marginal(time)
        return (time - (1 - time) * self.std**2) / variance

    def velocity(self, state, time):
        center, _ = self.marginal(time)
        return -self.mean + self.slope(time) * (state - center)

    def ends(self, discretization):
        """Mean and variance of what a discretization without memory leads to, exactly: all is linear."""
        mean, variance = 0.0, discretization.start**2
        for step in discretization.steps:
            a, b = step.of_state, step.of_velocity
            mean = a * mean + b * self.velocity(mean, step.time)
            variance = (a + b * self.slope(step.time)) ** 2 * variance + step.std**2
        return mean, variance
