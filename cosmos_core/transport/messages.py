"""Messages of the control plane: small attrs records, encoded by msgspec.

Up, a replica sends `Hello` until welcomed, then `Beat` (unreliable) and `Report`s (reliable: numbered per
incarnation, resent until acknowledged). Down, the controller sends `Directive`s: the whole desired state of that
replica, re-sent until it holds, so none of them needs to arrive.

Fences: `term` counts the controller's starts, `incarnation` is random per process, `generation` counts the
memberships of the gradient group, a `lease` names one attempt at one prompt.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

WIRE_VERSION = 1

Role: TypeAlias = Literal["policy", "rollout"]
Purpose: TypeAlias = Literal["train", "evaluation"]


# -- reports: replica -> controller, reliable ------------------------------------------------------------------------


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


# -- up --------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Hello:
    """Ask to join. `endpoints` are where this replica serves others, by purpose: `payloads`, `weights`, `store`.

    Of a replica of several processes, each serves the weights that it holds (see `transport.places`).
    """

    wire: int
    run_id: str
    name: str
    role: Role
    incarnation: str
    host: str
    pid: int
    step: int
    """Policy: the step its weights are of. Rollout: 0."""
    endpoints: dict[str, str]
    rack: str = ""
    """What has a faster network inside than outside, as the host is labelled (`COSMOS_RACK`); empty: not known."""


@attrs.frozen(kw_only=True)
class Beat:
    """Alive, and how it goes; also acknowledges directives."""

    name: str
    incarnation: str
    term: int
    revision: int
    """Newest directive seen."""
    gauges: dict[str, float]


@attrs.frozen(kw_only=True)
class Reports:
    """Reports `first`, `first + 1`, …; contiguous per incarnation, from 1."""

    name: str
    incarnation: str
    term: int
    first: int
    reports: tuple[bytes, ...]
    """Each an encoded `Report` (`cosmos_core.transport.codec`), so that the journal keeps them as they came."""


@attrs.frozen(kw_only=True)
class Watch:
    """An observer wants the journal from event `after` on."""

    run_id: str
    after: int


@attrs.frozen(kw_only=True)
class Command:
    """A person's request: `stop` ends the run with a checkpoint at the next step boundary."""

    run_id: str
    command: Literal["stop"]


Up: TypeAlias = Hello | Beat | Reports | Watch | Command


# -- directives: controller -> replica -------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Lease:
    """One attempt at one prompt."""

    lease: int
    purpose: Purpose
    position: int
    """Place in the prompt stream; for evaluations, the row's index."""
    row: int
    """Row of the split (`train` or `heldout`)."""
    version: int
    """Evaluations: the weight version to use. Training: -1, whatever is loaded."""


@attrs.frozen(kw_only=True)
class WeightTarget:
    """A version that a rollout replica shall load, and where it is, nearest first."""

    version: int
    digest: str
    sources: tuple[str, ...]
    """`weights` endpoints of policy replicas, one for each process, or that of a rollout replica which passes it on."""
    hosts: tuple[str, ...]
    """Host of each source: an equal host may use shared memory."""
    racks: tuple[str, ...] = ()
    """Rack of each source, empty where it is not known; none at all: of no source."""


@attrs.frozen(kw_only=True)
class Relaying:
    """A rollout replica's place in the tree of those that pass weights on."""

    level: int = 0
    """Rollout replicas between it and the policy."""
    reserve: WeightTarget | None = None
    """What to load from the policy itself if those above fail or do not have it in time; None: there is nothing."""
    keep: bool = False
    """Whether others read from this replica, so that it keeps a copy of what it loads."""
    retain: int = 0
    """Copies older than this version are no longer needed."""


@attrs.frozen(kw_only=True)
class RolloutDirective:
    """What a rollout replica shall be doing.

    Payloads under a lease that is neither in `leases` nor in `hold` are released.
    """

    weights: WeightTarget | None
    """None while there is none, or until those who pass it on to this replica have it (`relaying.reserve`)."""
    leases: tuple[Lease, ...]
    hold: tuple[int, ...]
    stop: bool
    relaying: Relaying = Relaying()


@attrs.frozen(kw_only=True)
class GroupRef:
    """A group of the batch: where its payloads are (empty endpoint: a demonstration, read `row`) and how it ended."""

    position: int
    row: int
    lease: int
    endpoint: str
    samples: tuple[SampleReport, ...]


@attrs.frozen(kw_only=True)
class TrainOrder:
    """Train one step. All members get the same `groups`; `shares[i]` are indices of the groups of member i.

    Members share demonstrations by their lengths, which nobody knows before they are read.
    """

    step: int
    """The step that results: weights of `step - 1` become those of `step`."""
    attempt: int
    stage: int
    """0: warm-up (if the recipe has one), then the main stage."""
    groups: tuple[GroupRef, ...]
    shares: tuple[tuple[int, ...], ...]
    publish: bool
    """Whether to publish the resulting weights."""
    measures: tuple[int, ...] = ()
    """Weight versions, of `step - 1` and `step`, whose held-out loss is wanted."""


@attrs.frozen(kw_only=True)
class GenerationOrder:
    """Form the gradient group: members in rank order. `source` sends its state to the others if `transfer`."""

    generation: int
    members: tuple[str, ...]
    store: str
    """`store` endpoint of member 0."""
    source: int
    transfer: bool


@attrs.frozen(kw_only=True)
class PolicyDirective:
    """What a policy replica shall be doing."""

    generation: GenerationOrder | None
    train: TrainOrder | None
    publish: int
    """Publish at least this version (the initial weights are 0); -1: nothing to publish."""
    retain: int
    """Snapshots older than this version are no longer needed."""
    checkpoint: int
    """Save a checkpoint of this step if it is the current one and not saved; -1: none."""
    stop: bool


@attrs.frozen(kw_only=True)
class Welcome:
    """The hello was accepted; reports up to `acknowledged` of this incarnation are durable."""

    term: int
    acknowledged: int


@attrs.frozen(kw_only=True)
class Refused:
    """The hello, or the replica itself, is not wanted (any more); it ends with this reason."""

    reason: str


@attrs.frozen(kw_only=True)
class Directive:
    """Desired state, numbered; anything not newer than the last seen of this term is ignored."""

    term: int
    revision: int
    acknowledged: int
    rollout: RolloutDirective | None = None
    policy: PolicyDirective | None = None


@attrs.frozen(kw_only=True)
class Acknowledged:
    """Reports up to this number are durable."""

    term: int
    acknowledged: int


@attrs.frozen(kw_only=True)
class Notices:
    """For observers: journal entries, each (sequence number, unix time, encoded event)."""

    entries: tuple[tuple[int, float, bytes], ...]
    gauges: dict[str, dict[str, float]]
    """Newest gauges of each replica, and of the controller under `controller`."""


Down: TypeAlias = Welcome | Refused | Directive | Acknowledged | Notices
