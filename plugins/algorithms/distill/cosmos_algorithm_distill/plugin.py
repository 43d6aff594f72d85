"""The entry point `distill`."""

from __future__ import annotations

from cosmos_algorithm_distill.exact import ExactDistillation
from cosmos_algorithm_distill.options import DistillOptions
from cosmos_algorithm_distill.sampled import SampledDistillation
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext, Provider, hookimpl


def make(options: DistillOptions, context: AlgorithmContext) -> Algorithm:  # noqa: ARG001 - the kind's signature
    """The objective that the options ask for.

    Raises:
        ConfigError: They contradict each other.
    """
    if options.estimate == "exact":
        return ExactDistillation(options)
    if options.divergence != "reverse-kl":
        raise ConfigError(
            f"divergence: {options.divergence!r}, but estimate = 'sampled' knows of the tokens that the policy draws "
            "only, and from these it is reverse-kl that can be estimated; set estimate to 'exact'"
        )
    return SampledDistillation(options)


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide on-policy distillation."""
    capabilities = AlgorithmCapabilities(payload_kinds=frozenset({"tokens"}), needs_rewards=False)
    return Provider(create=make, options=DistillOptions, capabilities=capabilities)
