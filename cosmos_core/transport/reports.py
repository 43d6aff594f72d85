"""Reports of replicas to the controller: reliable, numbered per incarnation, resent until acknowledged."""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

import attrs

from cosmos_core.transport.codec import Codec
from cosmos_core.types import Sample
from cosmos_core.types.bounds import Address, Count, Finite, Step, Text, Word


@attrs.frozen(kw_only=True)
class GroupFinished:
    """A leased prompt was completed and scored; the payloads stay with the replica under `lease`.

    `drop` is the algorithm's reason not to train on it (empty: train).
    """

    lease: Count
    samples: tuple[Sample, ...]
    drop: Text = ""
    text: Text = ""
    """The first sample's completion, or the prompt of what is no text, cut to 2,000 characters."""
    media: Word = ""
    """Where the first sample's image or video is, from the run's folder: only of evaluations, where there is one."""
    busy_s: Finite = 0.0
    """Seconds for which the replica has generated since it began."""
    scoring_s: Finite = 0.0
    """Seconds that requests for scores have taken since then, summed over those at the same time."""
    awaited_s: Finite = 0.0
    """Seconds since the last such report in which it had nothing to do but wait for scores."""


@attrs.frozen(kw_only=True)
class GroupFailed:
    """A leased prompt could not be completed, ever (too long, a bad row); it is dropped with this reason."""

    lease: Count
    reason: Text
    detail: Text


@attrs.frozen(kw_only=True)
class Troubled:
    """Something went wrong on a replica, `number` times since it was told last; the run goes on."""

    what: Text
    number: Count
    last: Text
    """Why, the last time."""


@attrs.frozen(kw_only=True)
class WeightsLoaded:
    """The rollout replica generates with this version; `digest` was read back from what is loaded."""

    version: Step
    digest: Word
    transfer_s: Finite
    paused_s: Finite
    nbytes: Count
    relayed: Count = 0
    """Of these bytes, those that came from other rollout replicas."""
    spared: Count = 0
    """Of these bytes, those that were not sent, as they follow from the version before and what changed."""
    endpoint: Address = ""
    """Where other rollout replicas can read the version from this one; empty: it keeps no copy of it."""


@attrs.frozen(kw_only=True)
class WeightsRejected:
    """The weights that were loaded do not have the version's digest; the replica serves nothing until it does.

    `reason` says which tensor is wrong and where it went wrong, as far as that is known.
    """

    version: Step
    digest: Word
    expected: Word
    reason: Text = ""


@attrs.frozen(kw_only=True)
class WeightsPublished:
    """The policy replica holds a snapshot of this version for rollout replicas to read."""

    version: Step
    digest: Word
    nbytes: Count


@attrs.frozen(kw_only=True)
class GenerationFormed:
    """The policy replica is a member of this generation's gradient group and holds the weights of `step`."""

    generation: Count
    step: Step


@attrs.frozen(kw_only=True)
class GenerationFailed:
    """The gradient group of this generation could not be formed or broke."""

    generation: Count
    reason: Text


@attrs.frozen(kw_only=True)
class HeldOutLoss:
    """The loss of the first held-out demonstrations at one weight version, the same on every member."""

    version: Step
    loss: float
    """Mean of minus the log-probability over all of their decisions."""
    num_units: Count
    """Those decisions."""
    num_rows: Count
    """Demonstrations that were measured."""
    dropped: tuple[tuple[Count, Text], ...] = ()
    """Those that could not be: (row, reason)."""
    details: dict[Word, Text] = attrs.field(factory=dict)
    """Of each of these reasons, what is wrong with one of them."""


@attrs.frozen(kw_only=True)
class StepDone:
    """The step is applied on this replica. `metrics` are of the whole batch on the group's rank 0, else empty."""

    step: Step
    attempt: Count
    generation: Count
    skipped: bool
    """Whether the gradient was not finite, so that the weights stayed as they were."""
    metrics: dict[Word, float]
    dropped: tuple[tuple[Count, Text], ...] = ()
    """Demonstrations of the batch that could not be used: (position, reason)."""
    details: dict[Word, Text] = attrs.field(factory=dict)
    """Of each of these reasons, and of those of demonstrations beside it, what is wrong with one of them."""
    heldout: tuple[HeldOutLoss, ...] = ()
    """What `TrainOrder.measures` asked for; less where the group broke after the step was applied."""


@attrs.frozen(kw_only=True)
class StepFailed:
    """The step was not applied; `missing` are leases whose payloads could not be fetched."""

    step: Step
    attempt: Count
    generation: Count
    missing: tuple[Count, ...]
    reason: Text


@attrs.frozen(kw_only=True)
class CheckpointSaved:
    """A complete checkpoint of `step` is at `path`."""

    step: Step
    path: Text
    generation: Step = -1
    """Of the gradient group that made it: a step that was undone comes again, in a later one. -1: not told."""


@attrs.frozen(kw_only=True)
class CheckpointFailed:
    """No checkpoint of `step` was made; nothing half-written is left that could be picked up."""

    step: Step
    reason: Text
    generation: Step = -1
    """As in `CheckpointSaved`."""


@attrs.frozen(kw_only=True)
class Slept:
    """The replica sleeps, in the turn of its newest directive, and wakes in a later one at the earliest."""

    turn: Count


@attrs.frozen(kw_only=True)
class Profiled:
    """The replica has traced what `ProfileOrder` asked for, or as much of it as could be."""

    ident: Word
    traces: tuple[Text, ...]
    """Files, from the run's folder."""
    problem: Text = ""
    """Why there is less than was asked for."""


@attrs.frozen(kw_only=True)
class Left:
    """The replica ends, as it was told to: it has done all that it had begun, and nobody needs what it holds."""


@attrs.frozen(kw_only=True)
class Failed:
    """The replica cannot go on and is about to end; `reason` is its error."""

    reason: Text


Report: TypeAlias = (
    GroupFinished
    | GroupFailed
    | Troubled
    | WeightsLoaded
    | WeightsRejected
    | WeightsPublished
    | GenerationFormed
    | GenerationFailed
    | StepDone
    | StepFailed
    | CheckpointSaved
    | CheckpointFailed
    | Profiled
    | Slept
    | Left
    | Failed
)

REPORT: Final = Codec(get_args(Report))
"""A single report, as it lies in `Reports.reports` and in the journal."""
