"""The entry point `reason-accuracy`."""

from __future__ import annotations

from typing import Final

import attrs

from cosmos_core.config import option
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_core.types import Prompt
from cosmos_reward_reason.references import right_answer
from cosmos_reward_reason.tags import read_tags

_SHOWN: Final = 200


@attrs.frozen(kw_only=True)
class AccuracyOptions:
    """Options of `reason-accuracy`."""

    tags: bool = option(
        True, help="Whether the answer is what stands in `<answer>` tags; otherwise it is the whole completion."
    )


class AccuracyReward:
    """1 for the right answer, 0 for another one, for none, and for several."""

    def __init__(self, options: AccuracyOptions, context: RewardContext) -> None:  # noqa: ARG002 - the kind's signature
        self._has_tags: Final = options.tags

    def vet(self, prompt: Prompt) -> None:
        """Look at a prompt's reference.

        Raises:
            DataError: It says nothing that is right.
        """
        right_answer(prompt.reference)

    def score(self, completion: Completion) -> Score:
        """Score one completion.

        Raises:
            DataError: The prompt's reference is unusable.
        """
        right = right_answer(completion.prompt.reference)
        answer = read_tags(completion.own).answer if self._has_tags else completion.own.strip()
        if answer is None:
            return Score(value=0.0, details={"answer": None})
        return Score(value=float(right.is_met_by(answer)), details={"answer": answer[-_SHOWN:]})


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the reward for the answer."""
    capabilities = RewardCapabilities(payload_kinds=frozenset({"tokens"}), deterministic=True)
    return Provider(create=AccuracyReward, options=AccuracyOptions, capabilities=capabilities)
