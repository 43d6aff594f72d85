"""The options of the diffusion engine."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import attrs
from attrs import validators as check

from cosmos_core.config.schema import ABOVE_ZERO, NOT_NEGATIVE, POSITIVE, option

SamplerName: TypeAlias = Literal["flow-sde", "cps", "edm", "euler", "unipc"]
EvaluationSamplerName: TypeAlias = Literal["euler", "unipc", "edm"]
Trained: TypeAlias = Literal["all", "even", "window"]

_LARGEST_CHURN: Final = 2.0**0.5 - 1.0


@attrs.frozen(kw_only=True)
class DiffusionOptions:
    """Options of the diffusion engine."""

    sampler: SamplerName = option(
        "flow-sde",
        help="How samples to train on are denoised: `flow-sde` (FlowGRPO), `cps`, `edm` (2ab with churn), or, where "
        "regressions are learned, along the ODE: `euler`, `unipc`, `edm`.",
    )
    evaluation_sampler: EvaluationSamplerName = option(
        "euler", help="How held-out prompts are: without noise, by `euler`, `unipc` or `edm`."
    )
    shift: float = option(
        3.0,
        help="Moves times towards noise, but those of `edm`: t becomes s t / (1 + (s - 1) t).",
        validator=ABOVE_ZERO,
    )
    noise_level: float = option(
        0.7,
        help="a of `flow-sde` and `cps`: how much noise a step adds.",
        validator=check.and_(check.gt(0.0), check.le(1.0)),
    )
    churn: float = option(
        0.2,
        help="Of `edm`: share by which a noisy step raises σ; 0.41 at most.",
        validator=check.and_(check.gt(0.0), check.le(_LARGEST_CHURN)),
    )
    sigma_max: float = option(200.0, help="σ of the first step of `edm`, and of Karras' times.", validator=ABOVE_ZERO)
    sigma_min: float = option(0.01, help="σ of the last step, likewise.", validator=ABOVE_ZERO)
    karras: bool = option(
        False, help="Whether `unipc` takes Karras' times, in place of evenly spaced ones moved by `shift`."
    )
    guidance: float | None = option(
        None,
        help="Scale of classifier-free guidance in the model's own formula; absent, there is none. It counts at 1 and "
        "below, too, where pipelines of diffusers turn it off.",
    )
    trained: Trained = option(
        "all",
        help="Which steps are decisions: `all` that are noisy, those of an `even` number, or a `window` of them, with "
        "no noise elsewhere. The last step never is.",
    )
    window: int = option(2, help="Steps of the window.", validator=POSITIVE)
    window_start: int = option(0, help="First step at which a window may begin.", validator=NOT_NEGATIVE)
    window_stop: int | None = option(
        None,
        help="Step before which it ends, at the latest; absent, half of the steps. Where it begins is drawn for each "
        "group.",
        validator=check.optional(POSITIVE),
    )
    shared_prefix: bool = option(
        False, help="Whether the samples of a group branch from one state where their window begins (FlowGRPO-Fast)."
    )
    same_noise: bool = option(False, help="Whether the samples of a group begin with the same noise.")
    regressions: int = option(
        0,
        help="Points at which each sample is learned as a regression (DiffusionNFT), in place of its transitions; 0 "
        "for transitions.",
        validator=NOT_NEGATIVE,
    )
    render_size: int = option(
        0,
        help="Most pixels of the longer side of rendered frames, which are scaled down to it; 0 leaves them.",
        validator=NOT_NEGATIVE,
    )
