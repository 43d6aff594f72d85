"""RLOO: REINFORCE with the mean of the other samples as the baseline.

    A = R - mean of the others of the group
    loss = mean over sequences of (1 / L) the sum over tokens of -w A log π, w = the detached min(π / π_old, cap)

Source: 2402.14740, the REINFORCE leave-one-out estimator. Deviations: a decision is weighed by its ratio to the weights
that generated it, which is 1 on-policy, as in the paper, where every sample is; sums are divided by a constant L, the
longest completion; the default of the cap is ours.
"""

from __future__ import annotations

import attrs

from cosmos_algorithm_grpo.making import weighted
from cosmos_algorithm_grpo.objective import CAPABILITIES
from cosmos_algorithm_grpo.options import WeightedOptions
from cosmos_algorithm_grpo.preset import defaults
from cosmos_core.protocols import Algorithm, Provider, hookimpl


@attrs.frozen(
    kw_only=True,
    field_transformer=defaults(
        baseline="leave-one-out", scale="none", aggregation="sequence-mean-token-sum", weight_cap=2.0
    ),
)
class RlooOptions(WeightedOptions):
    """Options of `rloo`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide RLOO."""
    return Provider(create=weighted, options=RlooOptions, capabilities=CAPABILITIES)
