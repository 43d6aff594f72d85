"""The entry point `math`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from cosmos_core.config import option
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_core.types import Prompt
from cosmos_reward_math.final_number import FinalNumber

if TYPE_CHECKING:
    from cosmos_reward_math.verified import MathVerify


@attrs.frozen(kw_only=True)
class MathOptions:
    """Options of `math`."""

    mode: Literal["math-verify", "final-number"] = option(
        "math-verify",
        help="`math-verify` takes any mathematically equal answer; `final-number` takes only the reference's number "
        "after the last `####`.",
    )


class MathReward:
    """1 for a right answer, 0 for a wrong one."""

    def __init__(self, options: MathOptions, context: RewardContext) -> None:  # noqa: ARG002 - the kind's signature
        self._scorer: FinalNumber | MathVerify = FinalNumber() if options.mode == "final-number" else _math_verify()

    def vet(self, prompt: Prompt) -> None:
        """Look at the reference.

        Raises:
            DataError: It is unusable.
        """
        self._scorer.vet(prompt)

    def score(self, completion: Completion) -> Score:
        """Score one completion.

        Raises:
            DataError: The prompt's reference is unusable.
        """
        return self._scorer.score(completion)


def _math_verify() -> MathVerify:
    # sympy takes a second to import, and only this mode needs it.
    from cosmos_reward_math.verified import MathVerify  # noqa: PLC0415 - see above

    return MathVerify()


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the math reward."""
    capabilities = RewardCapabilities(payload_kinds=frozenset({"tokens"}), deterministic=True)
    return Provider(create=MathReward, options=MathOptions, capabilities=capabilities)
