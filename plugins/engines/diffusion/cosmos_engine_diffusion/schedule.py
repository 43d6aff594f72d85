"""Denoising schedules: the steps of a request, those that are decisions, and the noise of each place.

Noise is a function of its place: of the request's seed, the sample and the step, and of nothing else in flight. Philox
(Salmon et al., SC 2011), a counter-based generator, is keyed with the place; numbers are drawn on the CPU.
"""

from __future__ import annotations

import functools
from typing import Final

import attrs
import numpy as np
import torch

from cosmos_core.protocols import Sampling
from cosmos_core.rollout.serving.randomness import sample_key
from cosmos_engine_diffusion.multistep import Edm, UniPc
from cosmos_engine_diffusion.options import DiffusionOptions, SamplerName
from cosmos_engine_diffusion.samplers import Cps, Discretization, Euler, FlowSde, Sampler

_WORD: Final = 1 << 64
_GROUP: Final = -1
"""Index of what is drawn for all samples of a request."""


@attrs.frozen(kw_only=True, eq=False)
class Schedule:
    """The steps of the samples of a request.

    Attributes:
        discretization: The steps.
        decided: Those that are decisions.
        branch: The first step that each sample takes by itself; those before are taken once for all.
        shares_noise: Whether the samples begin with the same noise.
    """

    discretization: Discretization
    decided: frozenset[int]
    branch: int = 0
    shares_noise: bool = False

    @property
    def num_steps(self) -> int:
        """Steps from noise to data."""
        return len(self.discretization.steps)


def make_schedule(options: DiffusionOptions, sampling: Sampling, seed: int) -> Schedule:
    """Make the schedule that a request asks for: at temperature 0, an ODE is followed; at 1, the options say."""
    number = sampling.max_units
    if sampling.temperature == 0:
        return Schedule(
            discretization=_discretization(sampler_of(options.evaluation_sampler, options), number), decided=frozenset()
        )
    sampler = sampler_of(options.sampler, options)
    if options.regressions:
        return Schedule(
            discretization=_discretization(sampler, number), decided=frozenset(), shares_noise=options.same_noise
        )
    most = sampler.num_noisy(number)
    if options.trained != "window":
        stride = 2 if options.trained == "even" else 1
        noisy = frozenset(range(most))
        return Schedule(
            discretization=_discretization(sampler, number, noisy),
            decided=frozenset(range(0, most, stride)),
            shares_noise=options.same_noise,
        )
    first = window_range(options, number)
    start = first.start + int(_generator(seed, _GROUP, 0).integers(len(first)))
    noisy = frozenset(range(start, start + options.window))
    return Schedule(
        discretization=_discretization(sampler, number, noisy),
        decided=noisy,
        branch=start if options.shared_prefix else 0,
        shares_noise=options.same_noise or options.shared_prefix,
    )


def window_range(options: DiffusionOptions, num_steps: int) -> range:
    """Steps at which a window may begin; empty where none fits."""
    most = sampler_of(options.sampler, options).num_noisy(num_steps)
    stop = max(num_steps // 2, options.window_start + options.window)
    stop = min(most, stop if options.window_stop is None else options.window_stop)
    return range(options.window_start, stop - options.window + 1)


@functools.lru_cache(maxsize=1024)
def _discretization(sampler: Sampler, num_steps: int, noisy: frozenset[int] = frozenset()) -> Discretization:
    return sampler.discretize(num_steps, noisy)


def sampler_of(name: SamplerName, options: DiffusionOptions) -> Sampler:
    """The sampler of a name, as options have it."""
    match name:
        case "flow-sde":
            return FlowSde(shift=options.shift, noise_level=options.noise_level)
        case "cps":
            return Cps(shift=options.shift, noise_level=options.noise_level)
        case "edm":
            return Edm(sigma_max=options.sigma_max, sigma_min=options.sigma_min, churn=options.churn)
        case "euler":
            return Euler(shift=options.shift)
        case "unipc":
            sigmas = (options.sigma_max, options.sigma_min) if options.karras else None
            return UniPc(shift=options.shift, sigmas=sigmas)


def noise(seed: int, index: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal, float32, on the CPU, for a step of a request's sample; step -1 makes the first state."""
    return torch.from_numpy(_generator(seed, index, step).standard_normal(shape, dtype=np.float32))


def sample_seed(seed: int, index: int) -> int:
    """A seed of a sample's own, below 2^63."""
    return int(_generator(seed, index, _WORD - 2).integers(1 << 63))


def _generator(seed: int, index: int, step: int) -> np.random.Generator:
    key = np.array([sample_key(seed, index) % _WORD, (step + 1) % _WORD], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
