"""What replicas report to the controller: reliable, numbered per incarnation, resent until acknowledged."""

from __future__ import annotations

from typing import TypeAlias

import attrs


@attrs.frozen(kw_only=True)
class SampleReport:
    """One sample of a finished group; the fields of `cosmos_core.types.Sample` (`status` is its value)."""

    index: int
    status: str
    reward: float | None
    rewards: dict[str, float]
    oldest_version: int
    newest_version: int
    num_units: int
    num_prompt_units: int
    detail: str = ""
    text: str = ""
    """The completion, cut to 2,000 characters: only of evaluations and of the first sample of a training group."""


@attrs.frozen(kw_only=True)
class GroupFinished:
    """A leased prompt was completed and scored; the payloads stay with the replica under `lease`.

    `drop` is the algorithm's reason not to train on it (empty: train).
    """

    lease: int
    samples: tuple[SampleReport, ...]
    drop: str = ""


@attrs.frozen(kw_only=True)
class GroupFailed:
    """A leased prompt could not be completed, ever (too long, a bad row); it is dropped with this reason."""

    lease: int
    reason: str
    detail: str


@attrs.frozen(kw_only=True)
class WeightsLoaded:
    """The rollout replica generates with this version; `digest` was read back from what is loaded."""

    version: int
    digest: str
    transfer_s: float
    paused_s: float
    nbytes: int
    relayed: int = 0
    """Of these bytes, those that came from other rollout replicas."""
    spared: int = 0
    """Of these bytes, those that were not sent, as they follow from the version before and what changed."""
    endpoint: str = ""
    """Where other rollout replicas can read the version from this one; empty: it keeps no copy of it."""


@attrs.frozen(kw_only=True)
class WeightsRejected:
    """What was loaded does not have the version's digest; the replica serves nothing until it does.

    `reason` says which tensor is wrong and where it went wrong, as far as that is known.
    """

    version: int
    digest: str
    expected: str
    reason: str = ""


@attrs.frozen(kw_only=True)
class WeightsPublished:
    """The policy replica holds a snapshot of this version for rollout replicas to read."""

    version: int
    digest: str
    nbytes: int


@attrs.frozen(kw_only=True)
class GenerationFormed:
    """The policy replica is a member of this generation's gradient group and holds the weights of `step`."""

    generation: int
    step: int


@attrs.frozen(kw_only=True)
class GenerationFailed:
    """The gradient group of this generation could not be formed or broke."""

    generation: int
    reason: str


@attrs.frozen(kw_only=True)
class HeldOutLoss:
    """What the first held-out demonstrations cost at one weight version, the same on every member."""

    version: int
    loss: float
    """Mean of minus the log-probability over all of their decisions."""
    num_units: int
    """Those decisions."""
    num_rows: int
    """Demonstrations that were measured."""
    dropped: tuple[tuple[int, str], ...] = ()
    """Those that could not be: (row, reason)."""


@attrs.frozen(kw_only=True)
class StepDone:
    """The step is applied on this replica. `metrics` are of the whole batch on the group's rank 0, else empty."""

    step: int
    attempt: int
    generation: int
    skipped: bool
    """Whether the gradient was not finite, so that the weights stayed as they were."""
    metrics: dict[str, float]
    dropped: tuple[tuple[int, str], ...] = ()
    """Demonstrations of the batch that could not be used: (position, reason)."""
    heldout: tuple[HeldOutLoss, ...] = ()
    """What `TrainOrder.measures` asked for; less where the group broke after the step was applied."""


@attrs.frozen(kw_only=True)
class StepFailed:
    """The step was not applied; `missing` are leases whose payloads could not be fetched."""

    step: int
    attempt: int
    generation: int
    missing: tuple[int, ...]
    reason: str


@attrs.frozen(kw_only=True)
class CheckpointSaved:
    """A complete checkpoint of `step` is at `path`."""

    step: int
    path: str


@attrs.frozen(kw_only=True)
class CheckpointFailed:
    """No checkpoint of `step` was made; nothing half-written is left that could be picked up."""

    step: int
    reason: str


@attrs.frozen(kw_only=True)
class Failed:
    """The replica cannot go on and is about to end; `reason` is its error."""

    reason: str


Report: TypeAlias = (
    GroupFinished
    | GroupFailed
    | WeightsLoaded
    | WeightsRejected
    | WeightsPublished
    | GenerationFormed
    | GenerationFailed
    | StepDone
    | StepFailed
    | CheckpointSaved
    | CheckpointFailed
    | Failed
)
