"""Results of a prompt: samples, the group of samples of one prompt, and the weights that made them."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from cosmos_core.types.bounds import Count, Finite, Step, Text, Word


class SampleStatus(enum.StrEnum):
    """The end of a sample. Only `OK` and `TRUNCATED` samples carry a reward and are trained on."""

    OK = "ok"
    TRUNCATED = "truncated"
    """It hit `rollout.sampling.max_units` or another limit; its reward counts, and it is counted and shown."""
    REWARD_FAILED = "reward_failed"
    """A reward raised, or returned no finite number."""
    REWARD_TIMEOUT = "reward_timeout"
    """A reward did not answer in its `timeout_s`."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The environment raised, answered with what cannot be used, or its process ended."""
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    """The environment did not answer in `environment.timeout_s`."""
    ENVIRONMENT_LOST = "environment_lost"
    """Its environment was lost with a worker process that ended because of others; the sample is not to blame."""

    @property
    def is_scored(self) -> bool:
        """True if the sample has a reward that statistics and training may use."""
        return self in (SampleStatus.OK, SampleStatus.TRUNCATED)


@attrs.frozen(kw_only=True)
class Sample:
    """One generated completion, as the control plane knows it (its payload stays with its maker).

    Attributes:
        index: Place within its group, from 0.
        status: How it ended.
        reward: Weighted sum of `rewards`; None unless the status is scored.
        rewards: Each reward by its plugin's name, unweighted.
        oldest_version: Weight version of its oldest generated unit; a sample is as stale as that.
        newest_version: Weight version of its newest generated unit.
        num_units: Generated units: tokens of a language model, denoising steps of a diffusion model.
        num_prompt_units: Conditioning units: the prompt's, and those of an environment's observations.
        detail: Why it failed, or what its rewards say of its score, for people; may be empty.
    """

    index: Count
    status: SampleStatus
    reward: Finite | None
    rewards: Mapping[Word, Finite]
    oldest_version: Step
    newest_version: Step
    num_units: Count
    num_prompt_units: Count
    detail: Text = ""

    @property
    def is_scored(self) -> bool:
        """True if the sample has a reward that statistics and training may use."""
        return self.status.is_scored and self.reward is not None


@attrs.frozen(kw_only=True)
class Group:
    """All samples of one prompt, in the order of their index.

    Attributes:
        position: Place of the prompt in the run's prompt stream, from 0. It names the prompt: a dataset
            row seen in two epochs has two positions.
        samples: The group's samples.
    """

    position: int
    samples: tuple[Sample, ...]

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest unit of any sample."""
        return min(sample.oldest_version for sample in self.samples)

    @property
    def num_units(self) -> int:
        """Generated units of all samples."""
        return sum(sample.num_units for sample in self.samples)


@attrs.frozen(kw_only=True)
class WeightVersion:
    """Weights after `number` optimizer steps of the run, attested by `digest`.

    Attributes:
        number: Optimizer steps taken so far; 0 is the initial model.
        digest: Hex digest over every canonical tensor as published (see `cosmos_core.weights.digest`).
    """

    number: int
    digest: str
