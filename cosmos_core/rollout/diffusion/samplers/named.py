"""Samplers by their names in a recipe."""

from __future__ import annotations

from cosmos_core.rollout.diffusion.options import DiffusionOptions, SamplerName
from cosmos_core.rollout.diffusion.samplers.cps import Cps
from cosmos_core.rollout.diffusion.samplers.edm import Edm
from cosmos_core.rollout.diffusion.samplers.euler import Euler
from cosmos_core.rollout.diffusion.samplers.sde import FlowSde
from cosmos_core.rollout.diffusion.samplers.step import Sampler
from cosmos_core.rollout.diffusion.samplers.unipc import UniPc


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
