"""The check of a run against the options of the diffusion engine: whatever it cannot draw is refused at plan time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cosmos_core.protocols import Model, PlannedRun, Preflight, Sampling
from cosmos_core.protocols.world import WorldModel
from cosmos_engine_diffusion.options import DiffusionOptions

_MOST_STEPS: Final = 1000
"""Times are told apart by thousandths in training."""

_OPTIONS: Final = "rollout.engine.options"
_ODES: Final = ("euler", "unipc", "edm")
_NOISELESS: Final = ("euler", "unipc")
_NO_TEMPERATURE: Final = "a denoised sample has no temperature: 1 is the sampler as it is, 0 its ODE"


def preflight(options: DiffusionOptions, planned: PlannedRun) -> Preflight:
    """Say what the engine cannot do of a run."""
    found = [*problems(options, planned.model)]
    if "rollout.sampling" in planned.samplings:
        found += noiseless(options)
    for key, sampling in planned.samplings.items():
        found += [f"{key}{said}" for said in sampling_problems(options, sampling)]
    found += [f"rollout.sampling{said}" for said in _undecided(options, planned.samplings.get("rollout.sampling"))]
    found += [
        f"{key}: {temperature:g}; {_NO_TEMPERATURE}"
        for key, temperature in planned.temperatures.items()
        if temperature not in (0.0, 1.0) and key.rpartition(".")[0] not in planned.samplings
    ]
    return Preflight(
        problems=tuple(found),
        decisions="regressions" if options.regressions else "transitions",
        decisions_key=f"{_OPTIONS}.regressions",
        most_decisions=_most_decisions(options, planned.samplings.get("rollout.sampling")),
    )


def _most_decisions(options: DiffusionOptions, sampling: Sampling | None) -> int:
    if options.regressions or options.trained == "window":
        return options.regressions or options.window
    if sampling is None:
        return 0
    # The last step never is one.
    return sampling.max_units // 2 if options.trained == "even" else sampling.max_units - 1


def problems(options: DiffusionOptions, model: Model) -> Iterator[str]:
    """Yield what options ask for that a model cannot give."""
    if not isinstance(model, WorldModel):
        yield (
            f"rollout.engine.plugin: 'diffusion' denoises, and {type(model).__name__} is no world model "
            "(cosmos_core.protocols.world.WorldModel); use the engine 'embedded', or another model"
        )
    if options.sigma_min >= options.sigma_max:
        yield f"{_OPTIONS}.sigma_min: {options.sigma_min:g} is not below sigma_max = {options.sigma_max:g}"
    if options.regressions and options.sampler not in _ODES:
        yield (
            f"{_OPTIONS}.sampler: {options.sampler!r} adds noise, and regressions are learned of what an ODE leads to; "
            f"take one of {', '.join(map(repr, _ODES))}"
        )
    if options.shared_prefix and (options.trained != "window" or options.regressions):
        yield f"{_OPTIONS}.shared_prefix: samples branch where a window begins; set trained = 'window'"


def noiseless(options: DiffusionOptions) -> Iterator[str]:
    """Yield why samples to train on cannot be drawn by this sampler; those of evaluations are drawn by another."""
    if options.sampler in _NOISELESS and not options.regressions:
        yield (
            f"{_OPTIONS}.sampler: {options.sampler!r} adds no noise, so that nothing is decided; take 'flow-sde', "
            "'cps' or 'edm', or learn regressions (regressions = 4)"
        )


def sampling_problems(options: DiffusionOptions, sampling: Sampling) -> Iterator[str]:
    """Yield what cannot be drawn, each to be put behind the name of what asks for it."""
    # Imported here so that listing plugins needs no torch.
    from cosmos_engine_diffusion.schedule import window_range  # noqa: PLC0415

    steps = sampling.max_units
    if sampling.temperature not in (0.0, 1.0):
        yield f".temperature: {sampling.temperature:g}; {_NO_TEMPERATURE}"
    if sampling.top_p != 1.0 or sampling.top_k != 0:
        yield f".top_p, top_k: {sampling.top_p:g} and {sampling.top_k}; noise is not cut: set top_p = 1, top_k = 0"
    if not 1 <= steps <= _MOST_STEPS:
        yield f".max_units: {steps} denoising steps; give 1 to {_MOST_STEPS}"
    elif _has_window(options, sampling) and not window_range(options, steps):
        yield (
            f".max_units: of {steps} steps, no window of {options.window} fits from step {options.window_start} "
            f"on{'' if options.window_stop is None else f' and before step {options.window_stop}'} among those "
            "that may be noisy; see window, window_start and window_stop of [rollout.engine.options]"
        )


def _undecided(options: DiffusionOptions, sampling: Sampling | None) -> Iterator[str]:
    """Refuse samples of which nothing can be learned; windows and ODEs are told of elsewhere."""
    if sampling is None or sampling.temperature != 1.0 or options.regressions or options.trained == "window":
        return
    if options.sampler in _NOISELESS or not 1 <= sampling.max_units <= _MOST_STEPS:
        return
    # Imported here so that listing plugins needs no torch.
    from cosmos_engine_diffusion.schedule import make_schedule  # noqa: PLC0415

    if not make_schedule(options, sampling, 0).decided:
        least = 3 if options.sampler == "edm" else 2
        number = sampling.max_units
        yield f".max_units: of {number} steps none is noisy, so that nothing is decided; give {least} or more"


def _has_window(options: DiffusionOptions, sampling: Sampling) -> bool:
    # Of a sampler without noise it is told that nothing is decided at all.
    is_noisy = sampling.temperature and not options.regressions and options.sampler not in _NOISELESS
    return bool(is_noisy) and options.trained == "window"
