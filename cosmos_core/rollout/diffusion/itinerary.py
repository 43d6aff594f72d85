"""The way of the samples of a request: the steps, which of them are decisions, and from where on samples differ."""

from __future__ import annotations

import functools

import attrs

from cosmos_core.protocols import Sampling
from cosmos_core.rollout.diffusion.noise import group_draw
from cosmos_core.rollout.diffusion.options import DiffusionOptions
from cosmos_core.rollout.diffusion.samplers.named import sampler_of
from cosmos_core.rollout.diffusion.samplers.step import Course, Sampler


@attrs.frozen(kw_only=True, eq=False)
class Itinerary:
    """The way of the samples of a request.

    Attributes:
        course: The steps.
        decided: Those that are decisions.
        branch: The first step that each sample takes by itself; those before are taken once for all.
        shares_noise: Whether the samples begin with the same noise.
    """

    course: Course
    decided: frozenset[int]
    branch: int = 0
    shares_noise: bool = False

    @property
    def num_steps(self) -> int:
        """Steps from noise to data."""
        return len(self.course.steps)


def itinerary(options: DiffusionOptions, sampling: Sampling, seed: int) -> Itinerary:
    """The way that a request asks for.

    Args:
        options: Of the engine.
        sampling: At temperature 0, an ODE is followed; at 1, the options say.
        seed: Of the request, for where a window begins.
    """
    number = sampling.max_units
    if sampling.temperature == 0:
        return Itinerary(course=_course(sampler_of(options.evaluation_sampler, options), number), decided=frozenset())
    sampler = sampler_of(options.sampler, options)
    if options.regressions:
        return Itinerary(course=_course(sampler, number), decided=frozenset(), shares_noise=options.same_noise)
    most = sampler.num_noisy(number)
    if options.trained != "window":
        stride = 2 if options.trained == "even" else 1
        noisy = frozenset(range(most))
        return Itinerary(
            course=_course(sampler, number, noisy),
            decided=frozenset(range(0, most, stride)),
            shares_noise=options.same_noise,
        )
    first = window_range(options, number)
    start = first.start + group_draw(seed, len(first))
    noisy = frozenset(range(start, start + options.window))
    return Itinerary(
        course=_course(sampler, number, noisy),
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
def _course(sampler: Sampler, num_steps: int, noisy: frozenset[int] = frozenset()) -> Course:
    return sampler.course(num_steps, noisy)
