"""The kit for rewards."""

from __future__ import annotations

from cosmos_core.testing.conformance.reward.failures import RewardFailures
from cosmos_core.testing.conformance.reward.requiring import RewardRequiring
from cosmos_core.testing.conformance.reward.values import RewardValues
from cosmos_core.testing.conformance.reward.vetting import RewardVetting


class RewardConformance(RewardFailures, RewardValues, RewardVetting, RewardRequiring):
    """What every reward must satisfy: a number for whatever a model writes, in time, in the workers of a run.

    Set `plugin`, and what else the defaults do not do for.

    Attributes:
        timeout_s: Seconds that a score may take; the recipe's default.
        examples: Completions, each with the score that it must get.
        unscorable: Completions for which `score` must raise, such as one of a prompt without a usable reference.
        reference_is_optional: Whether the reward judges answers without a reference too, and may score them otherwise.
        variables: Variables of the environment that the reward needs, which the tests set.

    Fixtures to override: `options`, the options to test with; `completions`, ordinary ones that must all get a score.
    The default ones answer an arithmetic question with the reference "8", rightly, wrongly and in every garbled way.
    """
