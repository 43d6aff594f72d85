"""The state of a run: what the fold of its events has come to. `core.step` is the only writer."""

from __future__ import annotations

import attrs

from cosmos_core.control.machine.ledger import Ledger, LedgerMark
from cosmos_core.control.machine.records import EvaluationRecord, HeldOutCompletion, SettingChange, StepRecord, known_as
from cosmos_core.control.machine.settings import Settings, StageSettings
from cosmos_core.transport.directives import GenerationOrder, GroupRef, Lease, ProfileOrder, TrainOrder
from cosmos_core.transport.messages import Role
from cosmos_core.transport.reports import HeldOutLoss, Troubled


@attrs.define(kw_only=True)
class Replica:
    """A replica that joined and was not lost since.

    Attributes:
        step: Policy: the step whose weights it holds, as far as it told.
        version: Rollout: the weights it generates with; -1 before it has any whose digest is right.
        leases: What it has in flight, by lease (ids rise, so oldest first).
        num_training: How many of those are for training.
        rejections: How often weights that it loaded did not have their digest.
        is_doubted: Whether the last weights that it loaded did not.
        rack: Label of where it runs; empty if it is not known.
        kept: Versions that it passes on to others, and the endpoint where.
        is_leaving: Whether it was told to leave: it takes part in nothing any more.
    """

    name: str
    role: Role
    incarnation: str
    host: str
    pid: int
    endpoints: dict[str, str]
    received: int = 0
    step: int = 0
    version: int = -1
    leases: dict[int, Lease] = attrs.field(factory=dict)
    num_training: int = 0
    held: set[int] = attrs.field(factory=set)
    rejections: int = 0
    is_doubted: bool = False
    rack: str = ""
    kept: dict[int, str] = attrs.field(factory=dict)
    is_leaving: bool = False


@attrs.define(kw_only=True)
class Generation:
    """A membership of the gradient group, and which members have formed it at which step."""

    order: GenerationOrder
    formed: dict[str, int] = attrs.field(factory=dict)
    is_ready: bool = False


@attrs.define(kw_only=True)
class RunningStep:
    """The step being trained: one order, kept until all members of one generation have applied it."""

    order: TrainOrder
    generation: int
    done: set[str] = attrs.field(factory=set)
    skipped: bool = False
    metrics: dict[str, float] = attrs.field(factory=dict)
    dropped: dict[int, str] = attrs.field(factory=dict)
    details: dict[str, str] = attrs.field(factory=dict)
    heldout: tuple[HeldOutLoss, ...] = ()


@attrs.define(kw_only=True)
class Published:
    """A weight version that policy replicas hold ready; `sources` are their names."""

    digest: str
    nbytes: int
    sources: set[str] = attrs.field(factory=set)


@attrs.frozen(kw_only=True)
class HeldOutResult:
    """The result of one held-out row, by default none, so that it is unscored; the first rows keep their text."""

    score: float | None = None
    reward: float | None = None
    is_truncated: bool = False
    completion: HeldOutCompletion | None = None


@attrs.define(kw_only=True)
class Evaluation:
    """An evaluation that is due: each row is queued, in flight, or has a result."""

    version: int
    queued: list[int]
    """Rows, the next one last."""
    in_flight: set[int] = attrs.field(factory=set)
    results: dict[int, HeldOutResult] = attrs.field(factory=dict)


@attrs.define(kw_only=True)
class Checkpoints:
    """Checkpoints ordered, saved and failed, and those saved that are removed for newer ones, by step."""

    ordered: int = -1
    """The one that is wanted and neither saved nor failed; -1: none."""
    saved: dict[int, str] = attrs.field(factory=dict)
    failed: dict[int, str] = attrs.field(factory=dict)
    removed: set[int] = attrs.field(factory=set)

    @property
    def kept(self) -> set[int]:
        """Checkpoints that the saver has not removed by its rule."""
        return self.saved.keys() - self.removed


@attrs.frozen(kw_only=True)
class StepMark:
    """A moment from which a run can be resumed: just after a step, or before the first one.

    Attributes:
        generation: Of the gradient group that did the step; no earlier one made a checkpoint of its weights.
        ledgers: Of each stage.
    """

    generation: int = 0
    ledgers: tuple[LedgerMark, ...]


@attrs.define(kw_only=True)
class Profiling:
    """A profile that was asked for: what replicas have yet to trace, what they have, and why that is not all."""

    ident: str
    orders: dict[str, ProfileOrder]
    traces: list[str] = attrs.field(factory=list)
    problems: dict[str, str] = attrs.field(factory=dict)


@attrs.define(kw_only=True)
class State:
    """Everything that scheduling, directives, the live view and the summary need.

    Attributes:
        settings: What the run goes by at its next step.
        step: The newest step that is done: the trainer's weight version.
        outcome: `finished`, `stopped` or `failed`; empty while the run goes on.
        has_ended: Whether the controller has told everyone.
        is_stopping: Whether a person asked for a stop.
        fenced: Incarnations that were lost or have left, and why; they may not come back.
        draining: Names of those that leave once they have finished what they have begun.
        departed: Names of those that have left, unless another process of that name has joined since.
        generation_number: Of the newest generation, ever.
        generation: The gradient group; None while there is none.
        is_regrouping: Whether the next generation waits for `RegroupDue`.
        num_regroups: Generations that broke since the last one that worked.
        num_useless: Prompts that failed or had too few scored samples since the last one that was of use.
        next_lease: Leases are never used twice.
        attempts: How often the next step has been ordered.
        held_back: How many prompts fewer than `sync.max_staleness` allows may be live, because some were stale.
        num_timely: Steps done since one was, or since fewer are held back.
        steps: Records of the newest steps, and of some earlier ones (`history`).
        published: Versions that rollout replicas may need.
        publish: The version that policy replicas shall publish if they have not; -1: none.
        targets: Versions that rollout replicas were told to load and may be loading, ascending; the last is current.
        parents: The rollout replica from which each one reads; those that are not in it read from the policy.
        num_moves: Rollout replicas that came into the tree or left it since it was last laid out anew.
        pending: Evaluations that are due, ascending by version; the first is being worked on.
        evaluations: Finished ones, in the order of their ends; of completions and of demonstrations.
        marks: The moments from which the run can be resumed, by step.
        undone: The newest generation when the run was last taken back, resumed or recovered: what it and earlier ones
            came to after the step from which the run went on did not happen.
        rollbacks: Steps that the run was taken back to since it was started or resumed, in order.
        changes: Of dynamic keys, in the order in which they were asked for.
        status_details: The newest explanation of each status of unscored samples, and of each failed prompt's reason,
            as it is known (`records.known_as`).
        troubles: How often each thing went wrong that replicas count (`reports.Troubled`).
        turn: Of pools that share GPUs (`turns`).
        sleepless: Names of replicas of the pool that had the turn before which have not said that they sleep.
        trusted: The version and the checkpoint that policy replicas were asked for last while they were at work.
        awaited_s: Seconds since the last step in which rollout replicas did nothing but wait for scores, summed.
        profile: The newest profile; None before anyone has asked for one.
        touched: Names whose directive may have changed since this was last cleared.
        members: Names of the replicas of each role, so that nobody has to look through all for a few.
        spare: Names of rollout replicas that may have room for another prompt, and of all that have.
        holders: Names of rollout replicas by the version that they generate with; none without any.
        readers: Names of those in the tree by the one from which they read; the empty name is the policy's.
        mapped: Hosts whose rollout replicas map a copy of the policy's, and take no part in the tree.
    """

    settings: Settings
    term: int = 0
    step: int = 0
    outcome: str = ""
    reason: str = ""
    has_ended: bool = False
    is_stopping: bool = False
    commands: set[str] = attrs.field(factory=set)
    replicas: dict[str, Replica] = attrs.field(factory=dict)
    fenced: dict[str, str] = attrs.field(factory=dict)
    draining: set[str] = attrs.field(factory=set)
    departed: set[str] = attrs.field(factory=set)
    has_started: bool = False
    has_rollouts: bool = False
    generation_number: int = 0
    generation: Generation | None = None
    is_regrouping: bool = False
    num_regroups: int = 0
    num_useless: int = 0
    ledgers: list[Ledger]
    next_lease: int = 1
    running: RunningStep | None = None
    attempts: int = 0
    held_back: int = 0
    num_timely: int = 0
    steps: list[StepRecord] = attrs.field(factory=list)
    published: dict[int, Published] = attrs.field(factory=dict)
    publish: int = -1
    targets: list[int] = attrs.field(factory=list)
    parents: dict[str, str] = attrs.field(factory=dict)
    num_moves: int = 0
    pending: list[Evaluation] = attrs.field(factory=list)
    evaluations: list[EvaluationRecord] = attrs.field(factory=list)
    checkpoints: Checkpoints = attrs.field(factory=Checkpoints)
    marks: dict[int, StepMark] = attrs.field(factory=dict)
    undone: int = 0
    rollbacks: list[int] = attrs.field(factory=list)
    changes: list[SettingChange] = attrs.field(factory=list)
    status_details: dict[str, str] = attrs.field(factory=dict)
    troubles: dict[str, int] = attrs.field(factory=dict)
    turn: int = 0
    sleepless: set[str] = attrs.field(factory=set)
    trusted: tuple[int, int] = (-1, -1)
    awaited_s: float = 0.0
    profile: Profiling | None = None
    touched: set[str] = attrs.field(factory=set, eq=False)
    members: dict[Role, set[str]] = attrs.field(factory=lambda: {"policy": set(), "rollout": set()}, eq=False)
    spare: set[str] = attrs.field(factory=set, eq=False)
    holders: dict[int, set[str]] = attrs.field(factory=dict, eq=False)
    readers: dict[str, set[str]] = attrs.field(factory=dict, eq=False)
    mapped: set[str] = attrs.field(factory=set, eq=False)

    @property
    def stage_index(self) -> int:
        """Index of the stage of the next step."""
        return self.settings.stage_index(self.step + 1)

    @property
    def stage(self) -> StageSettings:
        """The stage of the next step."""
        return self.settings.stages[self.stage_index]

    @property
    def ledger(self) -> Ledger:
        """Prompts of the stage of the next step."""
        return self.ledgers[self.stage_index]

    @property
    def trained_units(self) -> float:
        """Units that all steps trained on."""
        return sum(ledger.totals.units for ledger in self.ledgers)

    @property
    def is_trained(self) -> bool:
        """True if the last step is done."""
        return self.step >= self.settings.last_step

    @property
    def target(self) -> int:
        """The version that rollout replicas shall load; -1: none yet."""
        return self.targets[-1] if self.targets else -1

    def is_complete(self, role: Role) -> bool:
        """True if the run has had all replicas of a role that it starts with, so that it can go on with others."""
        return self.has_started if role == "policy" else self.has_rollouts

    def explain(self, reason: str, detail: str) -> None:
        """Keep what was said last of a reason that a plugin may have worded."""
        self.status_details[known_as(reason, self.status_details)] = detail

    def count(self, trouble: Troubled) -> None:
        """Count what went wrong on a replica."""
        number = self.troubles[trouble.what] = self.troubles.get(trouble.what, 0) + trouble.number
        self.status_details[trouble.what] = f"{number:,}, the last: {trouble.last}"

    def named(self, role: Role) -> list[Replica]:
        """The replicas of a role, by name."""
        return [self.replicas[name] for name in sorted(self.members[role])]

    def staying(self, role: Role) -> list[Replica]:
        """The replicas of a role that are not about to leave, by name."""
        return [replica for replica in self.named(role) if replica.name not in self.draining]

    def enter(self, replica: Replica) -> None:
        """Take a replica in."""
        self.replicas[replica.name] = replica
        self.members[replica.role].add(replica.name)
        if replica.role == "rollout":
            self.spare.add(replica.name)
            self.holders.setdefault(replica.version, set()).add(replica.name)

    def remove(self, replica: Replica) -> None:
        """Take a replica out."""
        del self.replicas[replica.name]
        self.members[replica.role].remove(replica.name)
        self.draining.discard(replica.name)
        if replica.role == "rollout":
            self.spare.discard(replica.name)
            self._unhold(replica)

    def hold(self, replica: Replica, version: int) -> None:
        """Note the version that a rollout replica generates with; -1 for none."""
        self._unhold(replica)
        replica.version = version
        self.holders.setdefault(version, set()).add(replica.name)

    def _unhold(self, replica: Replica) -> None:
        names = self.holders[replica.version]
        names.remove(replica.name)
        if not names:
            del self.holders[replica.version]

    def touch(self, role: Role | None = None) -> None:
        """Note that the directives of every replica (of a role) may have changed."""
        self.touched.update(name for name, replica in self.replicas.items() if role in (None, replica.role))

    def fail(self, reason: str) -> None:
        """End the run as failed, unless it has ended already."""
        self.conclude("failed", reason)

    def conclude(self, outcome: str, reason: str = "") -> None:
        """End the run, unless it has ended already."""
        if not self.outcome:
            self.outcome, self.reason = outcome, reason
            self.touch()

    def mark(self, generation: int = 0) -> None:
        """Remember this moment, just after a step that a generation did."""
        ledgers = tuple(ledger.mark() for ledger in self.ledgers)
        self.marks[self.step] = StepMark(generation=generation, ledgers=ledgers)

    def let_go(self, group: GroupRef | None) -> None:
        """Tell the holder of a group's payloads, if it is still there, that they are no longer needed."""
        holder = self.replicas.get(group.holder) if group is not None else None
        if holder is not None and group is not None and group.lease in holder.held:
            holder.held.remove(group.lease)
            self.touched.add(holder.name)


def opened(settings: Settings) -> State:
    """The state of a run that has just been opened."""
    state = State(settings=settings, ledgers=[Ledger() for _ in settings.stages])
    state.mark()
    return state
