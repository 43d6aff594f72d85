"""Directives: the whole desired state of a replica, re-sent until it holds; none needs to arrive."""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

from cosmos_core.types import Sample, Scalar

Purpose: TypeAlias = Literal["train", "evaluation"]


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
    settings: dict[str, Scalar] = attrs.field(factory=dict)
    """Dynamic keys that are not as in the recipe; one lease goes by the same from its beginning to its end."""


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
class ProfileOrder:
    """Steps that some processes of a replica shall trace, once."""

    ident: str
    """Of the request."""
    first: int
    """The first of them: a step of the policy. An engine begins with its next one."""
    steps: int
    ranks: tuple[int, ...]
    """Of the replica's processes."""


@attrs.frozen(kw_only=True)
class RolloutDirective:
    """The desired state of a rollout replica.

    Payloads under a lease that is neither in `leases` nor in `hold` are released.
    """

    weights: WeightTarget | None
    """None while there is none, or until those who pass it on to this replica have it (`relaying.reserve`)."""
    leases: tuple[Lease, ...]
    hold: tuple[int, ...]
    stop: bool
    relaying: Relaying = Relaying()
    leave: bool = False
    """Say `reports.Left` and end: nobody needs this replica any more, and the run goes on."""
    rollbacks: tuple[int, ...] = ()
    """Steps that the run was taken back to, in order; weights from after such a step that were loaded, or begun to be,
    before it was told are to be given up: their versions come again with other weights."""
    turn: int = 0
    """Of pools that share GPUs, rising."""
    sleep: bool = False
    """Give the memory of the device up, and say so of this turn (`reports.Slept`); not: be awake."""
    profile: ProfileOrder | None = None


@attrs.frozen(kw_only=True)
class GroupRef:
    """A completed prompt: where its payloads are and how it ended. A demonstration has none; `row` is to be read."""

    position: int
    row: int
    lease: int = -1
    holder: str = ""
    """Name of the rollout replica that has its payloads."""
    endpoint: str = ""
    samples: tuple[Sample, ...] = ()
    settings: dict[str, Scalar] = attrs.field(factory=dict)
    """Dynamic keys that were not as in the recipe when it was leased."""

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest unit of any sample; 0 for a demonstration."""
        return min((sample.oldest_version for sample in self.samples), default=0)

    @property
    def num_units(self) -> int:
        """Units that training on it processes, by which shares are balanced; 1 for a demonstration."""
        return sum(sample.num_units + sample.num_prompt_units for sample in self.samples) if self.samples else 1


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
    settings: dict[str, Scalar] = attrs.field(factory=dict)
    """Dynamic keys that are not as in the recipe; the same at each attempt."""


@attrs.frozen(kw_only=True)
class GenerationOrder:
    """Form the gradient group: members in rank order. `source` sends its state to the others if `transfer`.

    Those that do not hold the weights of `step` load `checkpoint` first, unless it is empty.
    """

    generation: int
    members: tuple[str, ...]
    store: str
    """`store` endpoint of member 0."""
    source: int
    transfer: bool
    step: int = 0
    checkpoint: str = ""


@attrs.frozen(kw_only=True)
class PolicyDirective:
    """The desired state of a policy replica."""

    generation: GenerationOrder | None
    train: TrainOrder | None
    publish: int
    """Publish at least this version (the initial weights are 0); -1: nothing to publish."""
    retain: int
    """Snapshots older than this version are no longer needed."""
    checkpoint: int
    """Save a checkpoint of this step if it is the current one and not saved; -1: none."""
    stop: bool
    leave: bool = False
    """Say `reports.Left` and end: nobody needs this replica any more, and the run goes on."""
    turn: int = 0
    sleep: bool = False
    """As of rollout replicas; what else is asked for is done first, by who is awake."""
    profile: ProfileOrder | None = None
