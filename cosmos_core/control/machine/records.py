"""Records for people: one of each step and evaluation, and counts of samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from cosmos_core.config.job import Unit
from cosmos_core.types import SampleStatus, Scalar

OTHER_REASONS: Final = "other reasons"
MOST_REASONS: Final = 50
"""As many are known by name, the first ones; every step has a copy, and a plugin may put numbers into its reasons."""
_OWN_REASONS: Final = frozenset(
    {"lost", "rolled-back", "stale", "unscored", *(status.value for status in SampleStatus)}
)

_LARGEST_EXPONENT: Final = 700.0
_BESIDE_DROPPED: Final = "imitation_dropped_"
"""How metrics begin that count demonstrations which could not be imitated; what follows is the reason."""


def known_as(reason: str, known: Mapping[str, object]) -> str:
    """The name under which a reason is counted: its own for the run's, and for the first `MOST_REASONS` of others."""
    is_named = reason in known or reason in _OWN_REASONS or len(known) < MOST_REASONS
    return reason if is_named else OTHER_REASONS


def count_dropped(counts: dict[str, int], reason: str, number: int) -> None:
    """Count what was dropped by its reason (`known_as`)."""
    reason = known_as(reason, counts)
    counts[reason] = counts.get(reason, 0) + number


@attrs.frozen(kw_only=True)
class StepRecord:
    """A step that every policy replica applied.

    Attributes:
        skipped: Whether its gradient was not finite, so that the weights stayed as they were.
        num_groups: Groups, or demonstrations, trained on.
        num_samples: Scored samples of those groups; demonstrations count one each.
        num_units: Generated units of those samples; 0 for demonstrations.
        equal: Groups of at least two of those samples that all have the same reward, by that reward.
        truncated: Share of the scored samples that were cut at the longest length.
        failed: Unscored samples of the step's groups, by status.
        staleness_mean: Mean over samples of (weights trained - oldest weights of the sample).
        metrics: What the policy reported of the whole batch.
        dropped: Prompts of the stage dropped so far, by reason (`count_dropped`).
        ages: Samples by (weights trained - oldest weights of the sample).
        settings: Values of dynamic keys that held, of those that were not as in the recipe.
        drawn: Groups by the sampling that they were drawn with, where it was not the recipe's, as `key=value`.
        generation: Of the gradient group that did it; a step that comes again has a later one.
        awaited_s: Seconds before it in which rollout replicas did nothing but wait for scores, their mean.
    """

    step: int
    stage: int
    attempt: int
    skipped: bool
    num_groups: int
    num_samples: int
    num_units: int
    reward: float | None
    rewards: dict[str, float]
    truncated: float
    failed: dict[str, int]
    staleness_mean: float
    staleness_max: int
    metrics: dict[str, float]
    dropped: dict[str, int]
    ages: dict[int, int] = attrs.field(factory=dict)
    settings: dict[str, Scalar] = attrs.field(factory=dict)
    drawn: dict[str, int] = attrs.field(factory=dict)
    generation: int = 0
    equal: dict[float, int] = attrs.field(factory=dict)
    awaited_s: float = 0.0

    @property
    def num_trained(self) -> int:
        """Samples that had a part in the gradient: none of a step that was skipped, nor of advantage 0 where it is."""
        return 0 if self.skipped else int(self.metrics.get("trained_sequences", self.num_samples))

    @property
    def trained_units(self) -> float:
        """Units that the step trained on: the trainer's own count if it gives one, else those that were generated."""
        return self.metrics.get("units", float(self.num_units))


@attrs.define(kw_only=True)
class StageTotals:
    """Sums over all steps of a stage.

    Attributes:
        units: Trained on (`StepRecord.trained_units`).
        samples: Scored samples of steps with a reward.
        trained: Those of them that had a part in the gradient (`StepRecord.num_trained`).
        staleness: Of these samples, summed.
        dropped: Demonstrations that could not be imitated beside rollouts, by reason (`imitation_dropped_*`).
    """

    steps: int = 0
    skipped: int = 0
    units: float = 0.0
    samples: int = 0
    trained: int = 0
    staleness: float = 0.0
    staleness_max: int = 0
    dropped: dict[str, float] = attrs.field(factory=dict)

    def add(self, record: StepRecord) -> None:
        """Take in one more step."""
        self.steps += 1
        self.skipped += record.skipped
        self.units += record.trained_units
        if record.reward is not None:
            self.samples += record.num_samples
            self.trained += record.num_trained
            self.staleness += record.staleness_mean * record.num_samples
            self.staleness_max = max(self.staleness_max, record.staleness_max)
        for name, value in record.metrics.items():
            if name.startswith(_BESIDE_DROPPED):
                reason = name.removeprefix(_BESIDE_DROPPED)
                self.dropped[reason] = self.dropped.get(reason, 0.0) + value

    def copy(self) -> StageTotals:
        """The sums as they are now."""
        return attrs.evolve(self, dropped=dict(self.dropped))


@attrs.frozen(kw_only=True)
class SettingChange:
    """A dynamic key that a person gave another value."""

    step: int
    """The first step at which it holds."""
    key: str
    before: Scalar
    after: Scalar


@attrs.frozen(kw_only=True)
class HeldOutCompletion:
    """The model's answer to one held-out row."""

    row: int
    text: str
    reward: float | None
    detail: str = ""
    """What the rewards say of the score, or why there is none."""
    media: str = ""
    """The image or video, from the run's folder; empty for none."""


@attrs.frozen(kw_only=True)
class EvaluationRecord:
    """A finished evaluation: of rollouts, which are scored, or of demonstrations, which have a loss.

    Attributes:
        accuracy: Mean of the first reward over all held-out prompts, of which unscored ones count 0, where that is 0 or
            1 of each (`are_right_or_wrong`). None otherwise, where no prompt was scored, and of demonstrations.
        reward: Mean reward of the scored prompts; None where there are none.
        num_unscored: Prompts without a score, not generated by exactly this version, or without a usable demonstration.
        num_truncated: Prompts whose completion was cut at the longest length.
        loss: Mean of minus the log-probability of the demonstrations' decisions; None of rollouts.
        num_units: Those decisions.
        dropped: Of the demonstrations that are not usable, how many there are for which reason.
        spread: Standard deviation of the rewards; 0 of fewer than two, and where an earlier release did not say.
        outdated: Keys of the recipe that scores depend on and that changed later, with the first step of each change:
            such an evaluation and those after it do not compare.
    """

    version: int
    accuracy: float | None
    reward: float | None
    num_prompts: int
    num_unscored: int
    num_truncated: int
    completions: tuple[HeldOutCompletion, ...]
    loss: float | None = None
    num_units: int = 0
    dropped: dict[str, int] = attrs.field(factory=dict)
    spread: float = 0.0
    outdated: dict[str, int] = attrs.field(factory=dict)

    @property
    def is_of_rollouts(self) -> bool:
        """True if rollouts were evaluated, and not demonstrations."""
        return self.loss is None

    @property
    def score(self) -> float | None:
        """The quality of the rollouts: their accuracy or, without one, their reward; None where none was scored."""
        return self.reward if self.accuracy is None and self.is_of_rollouts else self.accuracy

    @property
    def unscored(self) -> str:
        """Words for the prompts that have no score; none for none."""
        return f"{self.num_unscored} of {self.num_prompts} unscored" if self.num_unscored else ""

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss; infinite where that is too large for a number."""
        if self.loss is None:
            return None
        return math.exp(self.loss) if self.loss < _LARGEST_EXPONENT else math.inf


def merits(evaluations: Iterable[EvaluationRecord]) -> dict[int, float]:
    """The merit of each version: higher for better weights, and of one scale.

    Of rollouts it is their accuracy, if all that were scored have one, else their reward; of demonstrations minus their
    loss. That of a loss which is no number, or of no score, is the lowest.
    """
    known = list(evaluations)
    is_accuracy = all(each.accuracy is not None for each in known if each.score is not None)

    def merit(done: EvaluationRecord) -> float:
        found = (done.accuracy if is_accuracy else done.reward) if done.is_of_rollouts else -(done.loss or 0.0)
        return -math.inf if found is None or math.isnan(found) else found

    return {each.version: merit(each) for each in known}


def score_name(evaluations: Iterable[EvaluationRecord], unit: Unit) -> str:
    """The score of a run's rollouts: `accuracy` if all evaluations that scored some have one, else `reward`."""
    has_one = (each.accuracy is not None for each in evaluations if each.score is not None)
    return "accuracy" if unit == "token" and all(has_one) else "reward"


@attrs.define(kw_only=True)
class SampleCounts:
    """Counts of a stage's generated samples. What is neither consumed nor dropped is held by replicas.

    Attributes:
        units: Generated units of all samples.
        wasted: Those of samples that were dropped.
        stale: Those of samples that were dropped as stale.
    """

    generated: int = 0
    consumed: int = 0
    dropped: dict[str, int] = attrs.field(factory=dict)
    units: int = 0
    wasted: int = 0
    stale: int = 0

    def drop(self, reason: str, number: int, units: int) -> None:
        """Count samples that will not be trained on, and the units that were generated for them."""
        if number:
            count_dropped(self.dropped, reason, number)
            self.wasted += units
            self.stale += units if reason == "stale" else 0

    def copy(self) -> SampleCounts:
        """The counts as they are now."""
        return attrs.evolve(self, dropped=dict(self.dropped))
