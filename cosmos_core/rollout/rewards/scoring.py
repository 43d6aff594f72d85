"""Turns completions and their rewards into the samples of a group and their report."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from cosmos_core.config.schema import EnvironmentConfig, RewardConfig
from cosmos_core.errors import PluginBrokenError, told_as
from cosmos_core.models.tokens import array_of
from cosmos_core.protocols import Completion, Reward
from cosmos_core.rollout.episodes.dialogue import EpisodeResult
from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_core.transport.reports import GroupFinished
from cosmos_core.types import Message, Payload, Prompt, Sample, SampleStatus

TEXT_LENGTH: Final = 2000
_SCORED: Final = frozenset({"sample", "times", "logprobs", "versions", "guidance", "noise_seed"})
"""Arrays of a payload of latents that rewards see (see `cosmos_core.types.Payload`)."""


def to_score(prompt: Prompt, played: EpisodeResult, text: str) -> Completion:
    """A completion as rewards see it; tokens are seen as text only, a dialogue's with what stands between turns.

    Of what was denoised it sees the sample and numbers about it: neither the way there nor the model's conditioning,
    which are many times as large.
    """
    payload = played.generated.payload
    return Completion(
        prompt=prompt,
        text=text,
        payload=None if payload.kind == "tokens" else _scored(payload),
        media=played.generated.media,
        truncated=played.status is SampleStatus.TRUNCATED,
        turns=played.said or (Message(role="assistant", content=text),),
        num_units=played.generated.num_units,
    )


def _scored(payload: Payload) -> Payload:
    if payload.kind != "latents":
        return payload
    return attrs.evolve(payload, arrays={name: array for name, array in payload.arrays.items() if name in _SCORED})


def sample(
    index: int,
    played: EpisodeResult,
    outcomes: Sequence[Outcome],
    rewards: Sequence[RewardConfig],
    environment: EnvironmentConfig | None = None,
) -> Sample:
    """One sample of a group: the weighted sum of its rewards, or none of it if any of them, or generation, failed.

    Where a reward is below its gate, the sum is of those with a gate alone. The environment's own reward is one more.
    """
    generated = played.generated
    made = functools.partial(
        Sample,
        index=index,
        oldest_version=generated.oldest_version,
        newest_version=generated.newest_version,
        num_units=generated.num_units,
        num_prompt_units=_num_prompt_units(played),
    )
    if not played.status.is_scored:
        return made(status=played.status, reward=None, rewards={}, detail=played.detail)
    scored = [*zip(rewards, outcomes, strict=True)]
    failed = next((_named(config.label, outcome) for config, outcome in scored if outcome.value is None), None)
    values = {config.label: outcome.value for config, outcome in scored if outcome.value is not None}
    shut = _shut(outcomes, rewards)
    counted = [config for config in rewards if config.label in values and (not shut or config.gate is not None)]
    total = sum(config.weight * values[config.label] for config in counted)
    if environment is not None and played.reward is not None:
        values = {**values, environment.label: played.reward}
        total += 0.0 if shut else environment.weight * played.reward
    if failed is None and not math.isfinite(total):
        told = ", ".join(f"{label} {value:g}" for label, value in values.items())
        detail = f"the weighted sum of its rewards is not finite: {told}"
        failed = Outcome(value=None, status=SampleStatus.REWARD_FAILED, detail=detail)
    if failed is not None:
        return made(status=failed.status, reward=None, rewards=values, detail=failed.detail)
    detail = _details(played, outcomes, rewards, shut)
    return made(status=played.status, reward=float(total), rewards=values, detail=detail)


def trained(played: EpisodeResult, outcomes: Sequence[Outcome], rewards: Sequence[RewardConfig]) -> Payload:
    """The payload that is trained on: below a gate, what an environment gave for turns does not count, either."""
    payload = played.generated.payload
    if "turn_rewards" not in payload.arrays or not _shut(outcomes, rewards):
        return payload
    nothing = array_of(np.zeros(payload.arrays["turn_rewards"].shape))
    return attrs.evolve(payload, arrays={**payload.arrays, "turn_rewards": nothing})


def _shut(outcomes: Sequence[Outcome], rewards: Sequence[RewardConfig]) -> list[str]:
    """Names of the rewards that are below their gates."""
    pairs = zip(rewards, outcomes, strict=bool(outcomes))
    gated = ((each.label, outcome.value, each.gate) for each, outcome in pairs)
    return [label for label, value, gate in gated if value is not None and gate is not None and value < gate]


def report(lease: int, samples: Sequence[Sample], text: str, *, drop: str = "", media: str = "") -> GroupFinished:
    """A group as the controller is told of it; people look at the first sample, and at why others have no reward."""
    return GroupFinished(
        lease=lease,
        samples=tuple(attrs.evolve(each, detail="") if each.index and each.is_scored else each for each in samples),
        drop=drop,
        text=text[:TEXT_LENGTH],
        media=media,
    )


def _named(label: str, failed: Outcome) -> Outcome:
    """A failure, with whose it is; rewards name themselves in errors that planning tells of, too."""
    kind, own, rest = failed.detail.partition(f"reward {label}: ")
    detail = f"{kind}{rest}" if own and (not kind or kind.removesuffix(": ").isidentifier()) else failed.detail
    return attrs.evolve(failed, detail=f"{label}: {detail}")


def _details(
    played: EpisodeResult, outcomes: Sequence[Outcome], rewards: Sequence[RewardConfig], shut: Sequence[str]
) -> str:
    """Details of the environment's turns and of each reward's score, as one line."""
    told = [played.detail] if played.detail else []
    told += [
        f"{config.label}: {outcome.detail}" if len(rewards) > 1 else outcome.detail
        for config, outcome in zip(rewards, outcomes, strict=True)
        if outcome.detail
    ]
    told += [f"{', '.join(shut)}: below the gate, the rewards without one do not count"] if shut else []
    return "; ".join(told)


def _num_prompt_units(played: EpisodeResult) -> int:
    """Units that were given: the prompt's, and what stands between the model's turns."""
    arrays = played.generated.payload.arrays
    num_given = arrays["decided"].shape[0] - played.generated.num_units if "decided" in arrays else 0
    return (arrays["prompt"].shape[0] if "prompt" in arrays else 0) + num_given


def absent_here(configs: Sequence[RewardConfig], rewards: Sequence[Reward]) -> tuple[str, ...]:
    """Ask the rewards; of each that lacks something, its name and what, or the option that asks for it.

    Raises:
        CosmosError: What a reward raised of it, or one failed otherwise, or answered with something else.
    """
    found: list[str] = []
    for index, (config, reward) in enumerate(zip(configs, rewards, strict=True)):
        if not hasattr(reward, "absent"):
            continue
        where = f"reward plugin {config.plugin!r}"
        with told_as(PluginBrokenError, f"{where}: absent() failed"):
            told: object = reward.absent()
        if not isinstance(told, str):
            raise PluginBrokenError(f"{where}: absent() returned {told!r:.100}, which is no str")
        if told:
            is_of_option = told.partition(":")[0] in config.options
            found.append(f"reward.{index}.options.{told}" if is_of_option else f"reward {config.label}: {told}")
    return tuple(found)
