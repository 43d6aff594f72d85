"""From completions and what rewards made of them to the samples of a group and their report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cosmos_core.config.schema import RewardConfig
from cosmos_core.protocols import Completion, FinishReason, Generated
from cosmos_core.rollout.reward_pool import Outcome
from cosmos_core.transport.messages import SampleReport
from cosmos_core.types import Prompt, Sample, SampleStatus

TEXT_LENGTH: Final = 2000


def to_score(prompt: Prompt, generated: Generated, text: str) -> Completion:
    """What a reward sees of a completion; tokens are seen as text only."""
    return Completion(
        prompt=prompt,
        text=text,
        payload=None if generated.payload.kind == "tokens" else generated.payload,
        truncated=generated.reason is FinishReason.LENGTH,
    )


def sample(index: int, generated: Generated, outcomes: Sequence[Outcome], rewards: Sequence[RewardConfig]) -> Sample:
    """One sample of a group: the weighted sum of its rewards, or none of it if any reward failed.

    Args:
        index: Place in the group.
        generated: The completion.
        outcomes: Of each reward.
        rewards: The recipe's rewards.
    """
    failed = next((outcome for outcome in outcomes if outcome.value is None), None)
    values: Mapping[str, float] = {
        config.plugin: outcome.value
        for config, outcome in zip(rewards, outcomes, strict=True)
        if outcome.value is not None
    }
    total = sum(
        config.weight * outcome.value
        for config, outcome in zip(rewards, outcomes, strict=True)
        if outcome.value is not None
    )
    ended = SampleStatus.TRUNCATED if generated.reason is FinishReason.LENGTH else SampleStatus.OK
    return Sample(
        index=index,
        status=ended if failed is None else failed.status,
        reward=float(total) if failed is None else None,
        rewards=values,
        oldest_version=generated.oldest_version,
        newest_version=generated.newest_version,
        num_units=generated.num_units,
        num_prompt_units=_num_prompt_units(generated),
        detail=_details(outcomes, rewards) if failed is None else failed.detail,
    )


def report(scored: Sample, text: str | None) -> SampleReport:
    """A sample as the controller is told of it; `text` is cut, and None if nobody will look at this sample."""
    return SampleReport(
        index=scored.index,
        status=scored.status.value,
        reward=scored.reward,
        rewards=dict(scored.rewards),
        oldest_version=scored.oldest_version,
        newest_version=scored.newest_version,
        num_units=scored.num_units,
        num_prompt_units=scored.num_prompt_units,
        detail=scored.detail if text is not None or not scored.is_scored else "",
        text=(text or "")[:TEXT_LENGTH],
    )


def _details(outcomes: Sequence[Outcome], rewards: Sequence[RewardConfig]) -> str:
    """What each reward says of its score, as one line."""
    told = [
        f"{config.plugin}: {outcome.detail}" if len(rewards) > 1 else outcome.detail
        for config, outcome in zip(rewards, outcomes, strict=True)
        if outcome.detail
    ]
    return "; ".join(told)


def _num_prompt_units(generated: Generated) -> int:
    prompt = generated.payload.arrays.get("prompt")
    return prompt.shape[0] if prompt is not None else 0
