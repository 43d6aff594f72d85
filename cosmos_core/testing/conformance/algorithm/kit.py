"""The kit for algorithms."""

from __future__ import annotations

from cosmos_core.testing.conformance.algorithm.advantages import (
    AlgorithmAdmission,
    AlgorithmAdvantages,
    AlgorithmEstimating,
)
from cosmos_core.testing.conformance.algorithm.declarations import (
    AlgorithmChanging,
    AlgorithmDeclarations,
    AlgorithmImitating,
)
from cosmos_core.testing.conformance.algorithm.loss import AlgorithmGradients, AlgorithmPricing, AlgorithmSplits


class AlgorithmConformance(
    AlgorithmDeclarations,
    AlgorithmAdmission,
    AlgorithmAdvantages,
    AlgorithmEstimating,
    AlgorithmPricing,
    AlgorithmImitating,
    AlgorithmGradients,
    AlgorithmSplits,
    AlgorithmChanging,
):
    """What every algorithm must satisfy; no model and no engine is needed.

    Beside `plugin` and `options`, a test class may set or override:

    Attributes:
        on_policy_scale: The gradient of a decision's price is minus its advantage times this, on-policy; 1.0 unless
            set. None if it is no constant: only the sign is tested.
        couples_decisions: Whether the price of a decision depends on the log-probs of its whole sequence, as with
            ratios of sequences; False unless set. Sequences never depend on one another. Of latents it must not: their
            sequences may lie in several micro-batches.
        ignores: What is asked for without changing the loss, only to be reported: `"old_logprobs"`, `"entropy"`, or
            the role of a frozen model.
        rewards_order_advantages: Whether a sample's advantage rises with its own reward, all else the same, in one
            group at least, and falls in none; True unless set.
        has_other_terms: Whether the loss has a term that moves the policy on-policy whatever the advantage, such as a
            bonus; False unless set.
        context: Fixture: the `AlgorithmContext`; by default groups of 4, completions of 16, staleness 2, and groups
            of one without staleness for demonstrations.
        batch: Fixture: the `Batch` that is priced, as `cosmos_core.testing.conformance.algorithm.batch.draw` makes it;
            by default six random sequences, slightly off-policy.
        groups: Fixture: the groups that `admit` is asked about, and that advantages are computed of if it admits
            them; by default ordinary, equal, extreme and unscored rewards.
        reference: Method `reference(decisions) -> tensor`: the price of each decision by the formula of the paper, in
            float64, with a gradient; by default None, and nothing is compared.
    """
