"""At which times denoising steps begin: t from 1, noise, towards 0, data."""

from __future__ import annotations

from typing import Final

import numpy as np

RHO: Final = 7.0


def shifted(num_steps: int, shift: float) -> list[float]:
    """Evenly spaced from 1 to 1/n, then moved towards noise: t ← s t / (1 + (s - 1) t).

    Source: arXiv:2403.03206, equation 23.

    Args:
        num_steps: How many.
        shift: s; 1 leaves them evenly spaced.
    """
    return _shift(np.linspace(1.0, 1.0 / num_steps, num_steps), shift)


def unipc_shifted(num_steps: int, shift: float, num_train_steps: int = 1000) -> list[float]:
    """As those of `shifted`, of n + 1 points from 1 to 1/1000 but the last; the first a little below 1.

    These are the times of the UniPC scheduler of diffusers for flow models: at 1, the signal-to-noise ratio that it
    computes with would be 0.
    """
    times = _shift(np.linspace(1.0, 1.0 / num_train_steps, num_steps + 1)[:-1], shift)
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
