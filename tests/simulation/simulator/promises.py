"""What must hold of an order, a lease, an evaluation or a request in the moment in which it comes to be.

Written apart from the machine: the rules are said again here, in few words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Final

from cosmos_core.control.machine.records import EvaluationRecord, SettingChange
from cosmos_core.control.machine.settings import Settings
from cosmos_core.control.machine.state import Generation, Replica, State
from cosmos_core.transport.directives import GroupRef, Lease
from cosmos_core.transport.messages import Drain, Request, Set, Stop
from cosmos_core.types import Scalar

_PACE: Final = ("sync.interval", "sync.max_staleness")


class Asked:
    """Changes that were taken in, each with the first step at which it holds."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, str, Scalar]] = []
        self._ordered = 0
        """The newest step that was ordered."""

    def order(self, step: int) -> None:
        """A step was ordered: what is asked for later does not hold at it."""
        self._ordered = max(self._ordered, step)

    def ask(self, request: Set, step: int) -> None:
        """Somebody's request was taken in while so many steps were done."""
        first = max(step, self._ordered) + 1
        for override in request.overrides:
            key, _, value = override.partition("=")
            self._changes.append((first, key, json.loads(value)))

    def undo(self, step: int) -> None:
        """The run goes on from a step; of what was asked for, that stays which holds at the next one."""
        self._changes = [change for change in self._changes if change[0] <= step + 1]
        self._ordered = step

    def recover(self, known: Iterable[SettingChange], step: int) -> None:
        """Only the snapshot of a step is left: it may have been written before the last changes at the next step."""
        kept = [change for change in self._changes if change[0] <= step]
        self._changes = [*kept, *((each.step, each.key, each.after) for each in known if each.step > step)]

    def paced(self, settings: Settings, step: int) -> int:
        """The newest step, up to this one, from which on weights are published at another pace; 0: none."""
        found, values = 0, {key.key: key.value for key in settings.dynamic}
        for first, key, value in self._changes:
            if first <= step and values[key] != value:
                values[key] = value
                found = first if key in _PACE else found
        return found

    def is_bound_set(self) -> bool:
        """Whether the bound on staleness may be lower than it was when prompts were leased."""
        return any(key == "sync.max_staleness" for _, key, _ in self._changes)

    def values(self, settings: Settings, step: int) -> dict[str, Scalar]:
        """Of dynamic keys at a step, those that are not as in the recipe: the newest change counts."""
        found = {key: value for first, key, value in self._changes if first <= step}
        return {key.key: found[key.key] for key in settings.dynamic if found.get(key.key, key.value) != key.value}


_KEYS: Final = {
    "sync.max_staleness": "sync_max_staleness",
    "sync.interval": "sync_interval",
    "policy.checkpoint.interval": "policy_checkpoint_interval",
}
"""Dynamic keys that the controller goes by, and the settings that have their values."""


class Promises:
    """Sees what is new after each event.

    Attributes:
        asked: What dynamic keys were asked to be.
    """

    def __init__(self) -> None:
        self.asked: Final = Asked()
        self._leases: dict[str, set[int]] = {}
        self._gone: set[int] = set()
        self._num_evaluations = 0
        self._group: tuple[int, set[str]] | None = None
        """Number and processes of the gradient group, once it has formed."""
        self._running = 0
        """The step that was running after the event before."""
        self._leaving: set[str] = set()
        self._num_stale = 0
        self._outcome = ""

    def lose(self, leases: Iterable[int]) -> None:
        """Payloads are gone: what was made under these leases can never be trained on."""
        self._gone.update(leases)

    def observe(self, state: State) -> Iterator[tuple[str, str]]:
        """What is wrong after an event: the oracle's name, and what it saw."""
        yield from self._order(state)
        yield from self._generations(state)
        yield from self._grants(state)
        yield from self._evaluations(state)
        yield from self._leaves(state)
        yield from self._slow(state)
        yield from _present(state)
        self._running = state.running.order.step if state.running is not None else 0
        if state.outcome != self._outcome:
            self._outcome = state.outcome
            yield from _concluded(state)
        if state.outcome:
            return
        yield from _served(state)
        if not state.attempts:
            yield from self._settled(state)

    def _order(self, state: State) -> Iterator[tuple[str, str]]:
        if state.running is None:
            return
        order = state.running.order
        self.asked.order(order.step)
        if order.settings != (expected := self.asked.values(state.settings, order.step)):
            yield "settings", f"step {order.step} was ordered with {order.settings}, asked for was {expected}"
        if state.generation is None or state.running.generation != state.generation.order.generation:
            return
        if not state.generation.is_ready:
            yield "batch", f"step {order.step} was ordered of a generation that has not formed"
        if again := self._gone.intersection(group.lease for group in order.groups):
            yield "batch", f"step {order.step} is tried with payloads that are gone: leases {sorted(again)}"
        if order.publish != (due := _is_published(state.settings, order.step, self.asked)):
            yield "versions", f"step {order.step} is ordered with publish {order.publish}, due is {due}"
        if any(sample.detail for group in order.groups for sample in group.samples):
            yield "batch", f"the order of step {order.step} carries details"
        stage = state.settings.stages[order.stage]
        if stage.uses_rollouts and (few := [g.position for g in order.groups if _scored(g) < stage.min_group_size]):
            yield "batch", f"step {order.step} has prompts with too few scored samples: {few}"

    def _generations(self, state: State) -> Iterator[tuple[str, str]]:
        before, generation = self._group, state.generation
        present = {replica.name: replica.incarnation for replica in state.replicas.values()}
        self._group = None
        if generation is not None and generation.is_ready:
            members = {present.get(name, "") for name in generation.order.members}
            self._group = generation.order.generation, members
            if before is None or before[0] != generation.order.generation:
                yield from self._formed(state, generation)
        if before is None or generation is None or generation.order.generation == before[0] or state.running is None:
            return
        if before[1] <= set(present.values()):
            yield "batch", f"step {state.running.order.step} was broken off, and nobody of its group was lost"

    def _formed(self, state: State, generation: Generation) -> Iterator[tuple[str, str]]:
        """Members begin with the same weights: those of the newest step, or of the one that was running."""
        newest, steps = max(state.step, self._running), set(generation.formed.values())
        if len(steps) > 1 or max(steps) > newest:
            yield "weights", f"the group has formed with the weights of {generation.formed}, the newest are of {newest}"

    def _grants(self, state: State) -> Iterator[tuple[str, str]]:
        before, self._leases = self._leases, {}
        granted: list[tuple[Lease, Replica]] = []
        for replica in state.replicas.values():
            known = before.get(replica.incarnation, set())
            self._leases[replica.incarnation] = set(replica.leases)
            granted += [(lease, replica) for number, lease in replica.leases.items() if number not in known]
        live = state.ledger.consumed + state.ledger.num_live
        for lease, replica in sorted(granted, key=lambda each: -each[0].lease):
            yield from _grant(state, replica, lease, live)
            live -= lease.purpose == "train"

    def _evaluations(self, state: State) -> Iterator[tuple[str, str]]:
        if len(state.evaluations) <= self._num_evaluations:
            self._num_evaluations = len(state.evaluations)
            return
        self._num_evaluations = len(state.evaluations)
        made = [(done.version, done.loss is None) for done in state.evaluations]
        if len(set(made)) != len(made):
            yield "evaluation", f"a version was evaluated twice: {sorted(made)}"
        newest, settings = state.evaluations[-1], state.settings
        most = settings.evaluation_prompts if newest.loss is None else settings.heldout_rows
        if newest.num_prompts != most:
            yield "evaluation", f"{_name(newest)} has {newest.num_prompts} rows of {most}"

    def _leaves(self, state: State) -> Iterator[tuple[str, str]]:
        """Who is told to leave has nothing that anybody waits for."""
        before = self._leaving
        self._leaving = {replica.incarnation for replica in state.replicas.values() if replica.is_leaving}
        for replica in state.replicas.values():
            if replica.incarnation not in self._leaving - before:
                continue
            generation = state.generation
            if replica.role == "rollout":
                is_free = not replica.leases and not replica.held
            else:
                is_free = generation is not None and generation.is_ready and replica.name not in generation.formed
            if not is_free:
                yield "drain", f"{replica.name} is told to leave, and is not free: its group is {generation}"

    def _slow(self, state: State) -> Iterator[tuple[str, str]]:
        """No prompt that was leased in time becomes stale, however slow it is, unless somebody lowers the bound."""
        before, self._num_stale = self._num_stale, sum(ledger.dropped.get("stale", 0) for ledger in state.ledgers)
        if self._num_stale > before and not self.asked.is_bound_set():
            yield "stale", f"{self._num_stale - before} prompts are too old for step {state.step + 1}"

    def _settled(self, state: State) -> Iterator[tuple[str, str]]:
        values = self.asked.values(state.settings, state.step + 1)
        for key, name in _KEYS.items():
            present = getattr(state.settings, name)
            if key in values and present != values[key]:
                yield "settings", f"the controller goes by {name} {present}, {key} is {values[key]}"


def kept(state: State, request: Request) -> Iterator[tuple[str, str]]:
    """Whether what was asked for, and taken in just now, is so."""
    match request:
        case Stop() if not state.is_stopping:
            yield "request", "a stop was taken in, and the run goes on"
        case Drain() if request.name in state.replicas:
            yield from _draining(state, request.name)
        case _:
            pass


def _draining(state: State, name: str) -> Iterator[tuple[str, str]]:
    role = state.replicas[name].role
    if name not in state.draining:
        yield "request", f"{name} was asked to leave, and stays"
    if all(each.role != role or each.name in state.draining for each in state.replicas.values()):
        yield "request", f"{name} was asked to leave, and no other {role} replica stays"


def _is_published(settings: Settings, step: int, asked: Asked) -> bool:
    """Whether the weights of a step are: those that are evaluated, the last ones, and others at the pace set last."""
    if not settings.rollout_replicas:
        return False
    if settings.evaluates(step) or step == settings.last_step:
        return True
    since = step - max(settings.main.first_version, asked.paced(settings, step) - 1)
    return settings.main.uses_rollouts and since >= 0 and since % settings.sync_interval == 0


def _present(state: State) -> Iterator[tuple[str, str]]:
    """What is said of who is in the run: none of them has left, and who maps the policy's copies is on its hosts."""
    if present := state.departed & state.replicas.keys():
        yield "drain", f"{sorted(present)} are in the run, and are said to have left"
    hosts = {each.host for each in state.replicas.values() if each.role == "policy"}
    wanted = hosts if state.settings.shares_memory else set()
    if state.settings.sync_fan_out and state.mapped != wanted:
        yield "told", f"policy replicas are on {sorted(hosts)}, rollout replicas map copies on {sorted(state.mapped)}"


def _grant(state: State, replica: Replica, lease: Lease, live: int) -> Iterator[tuple[str, str]]:
    """What is wrong with a lease after which so many prompts were live or trained on."""
    settings, stage = state.settings, state.stage
    if lease.purpose == "evaluation":
        if replica.version != lease.version:
            yield "evaluation", f"{replica.name} holds version {replica.version}, leased was a row of {lease.version}"
        return
    if not settings.synchronous and replica.num_training > settings.capacity:
        yield "lease", f"{replica.name} has {replica.num_training} prompts, and room for {settings.capacity}"
    if settings.synchronous and replica.version != state.step:
        yield "lease", f"{replica.name} shall generate with version {replica.version}, and the next step is of another"
    steps = min(replica.version + settings.sync_max_staleness + 1 - stage.first_version, stage.steps)
    if live > steps * stage.prompts_per_step:
        yield "lease", f"{live} prompts are live or trained on, {replica.name} was given one that will be too old"


def _concluded(state: State) -> Iterator[tuple[str, str]]:
    """A run that ends as it should has a checkpoint of its newest step, and no other step under way."""
    if not state.has_started or state.outcome not in ("finished", "stopped"):
        return
    ended = f"the run {state.outcome} at step {state.step}"
    if state.running is not None:
        yield "request", f"{ended}, and step {state.running.order.step} is running"
    if state.step not in state.checkpoints.saved:
        yield "request", f"{ended}, there are checkpoints of {sorted(state.checkpoints.saved)}"


def _served(state: State) -> Iterator[tuple[str, str]]:
    """Weights that shall be loaded, and that nobody of the policy has any more, are made up for by newer ones."""
    known = state.published.get(state.target)
    if known is not None and not known.sources and state.publish < state.step:
        yield "weights", f"nobody can serve version {state.target}, and none is asked for after {state.publish}"


def _scored(group: GroupRef) -> int:
    return sum(sample.reward is not None for sample in group.samples)


def _name(done: EvaluationRecord) -> str:
    return f"the evaluation of version {done.version}"
