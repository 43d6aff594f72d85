"""What became of every prompt, batch and weight version, kept apart from the machine's own counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cosmos_core.control.machine.records import StepRecord
from cosmos_core.control.machine.state import RunningStep, State
from cosmos_core.transport.directives import TrainOrder
from cosmos_core.types import Scalar
from tests.simulation.replicas import INITIAL_DIGEST, FakePolicy, trained
from tests.simulation.simulator.promises import Promises


class History:
    """Watches a state from one event to the next.

    Attributes:
        promises: What holds of orders, leases and evaluations.
        undone: The newest generation of the gradient group when the run was last taken back.
        weights: Digest of the weights of each step, which follow from the batches alone.
    """

    def __init__(self, state: State) -> None:
        self.weights: Final[dict[int, str]] = {0: INITIAL_DIGEST}
        self._live: Final[list[set[int]]] = [set() for _ in state.ledgers]
        self._over: Final[list[set[int]]] = [set() for _ in state.ledgers]
        self._batches: Final[dict[int, tuple[int, set[int]]]] = {}
        self._joined: Final[dict[str, str]] = {}
        self._left: Final[set[str]] = set()
        self.undone = 0
        self._newest_generation = 0
        self._num_rollbacks = 0
        self._ended: Final[dict[int, list[set[int]]]] = {0: [set() for _ in state.ledgers]}
        self._settings: Final[dict[int, dict[str, Scalar]]] = {}
        self._draining: Final[dict[str, set[int]]] = {}
        self.promises: Final = Promises()

    def observe(
        self, state: State, running: RunningStep | None, step: int, *, is_resumed: bool = False
    ) -> Iterable[tuple[str, str]]:
        """What is wrong after an event: the oracle's name, and what it saw.

        Args:
            state: After the event.
            running: The step that was being trained before it.
            step: The newest step that was done before it.
            is_resumed: Whether with it the run goes on from a checkpoint.
        """
        is_rolled_back = is_resumed or len(state.rollbacks) != self._num_rollbacks
        if is_rolled_back:
            yield from self._rolled_back(state)
            if not is_resumed:
                yield from _taken_back(state, step)
        if state.generation is not None:
            self._newest_generation = state.generation.order.generation
        yield from self._prompts(state)
        yield from self._replicas(state)
        yield from self._drains(state)
        yield from self._orders(state)
        yield from _claimed(state)
        yield from self.promises.observe(state)
        if state.step != step and not is_rolled_back:
            yield from self._batch(state, running, step)

    def _prompts(self, state: State) -> Iterable[tuple[str, str]]:
        for index, ledger in enumerate(state.ledgers):
            now = {*ledger.queued, *ledger.in_flight, *ledger.finished, *ledger.batched}
            live, over = self._live[index], self._over[index]
            known = len(live) + len(over)
            over |= (live | set(range(known, ledger.next_position))) - now
            self._live[index] = now
            if again := now & over:
                yield "terminal", f"prompts {sorted(again)} of stage {index} came back from their end"
            if len(over) != ledger.consumed + ledger.num_dropped:
                yield "terminal", f"{len(over)} prompts ended, {ledger.consumed} consumed, {ledger.num_dropped} dropped"

    def _rolled_back(self, state: State) -> Iterable[tuple[str, str]]:
        """What was done after a step did not happen; what had ended before it has."""
        self._num_rollbacks = len(state.rollbacks)
        step = state.step
        self.undone = self._newest_generation
        self.promises.asked.undo(step)
        for kept in (self.weights, self._batches, self._ended, self._settings):
            for later in [each for each in kept if each > step]:
                del kept[later]
        for index, ledger in enumerate(state.ledgers):
            now = {*ledger.queued, *ledger.in_flight, *ledger.finished, *ledger.batched}
            over = set(range(ledger.next_position)) - now
            if over != self._ended[step][index]:
                yield "terminal", f"back at step {step}, {sorted(over ^ self._ended[step][index])} are not as they were"
            self._live[index], self._over[index] = now, over

    def _drains(self, state: State) -> Iterable[tuple[str, str]]:
        """Who drains begins nothing."""
        for name in [name for name in self._draining if name not in state.draining]:
            del self._draining[name]
        for name in state.draining:
            leases = set(state.replicas[name].leases)
            if new := leases - self._draining.get(name, leases):
                yield "drain", f"{name} drains, and was given the leases {sorted(new)}"
            self._draining[name] = leases

    def _orders(self, state: State) -> Iterable[tuple[str, str]]:
        """Every attempt at a step goes by the same dynamic keys."""
        if state.running is not None:
            order = state.running.order
            first = self._settings.setdefault(order.step, order.settings)
            if order.settings != first:
                yield "settings", f"step {order.step} was ordered with {first}, and again with {order.settings}"

    def _replicas(self, state: State) -> Iterable[tuple[str, str]]:
        present = {replica.name: replica.incarnation for replica in state.replicas.values()}
        if present == self._joined:
            return
        self._left.update(set(self._joined.values()) - set(present.values()))
        self._joined.clear()
        self._joined.update(present)
        if again := self._left & set(present.values()):
            yield "fence", f"{sorted(again)} had left the run, and are in it again"

    def _batch(self, state: State, running: RunningStep | None, step: int) -> Iterable[tuple[str, str]]:
        if running is None or state.step != step + 1 or running.order.step != state.step:
            yield (
                "batch",
                f"step {state.step} is done after step {step}, but {running and running.order.step} was running",
            )
            return
        order, record = running.order, state.steps[-1]
        positions = {group.position for group in order.groups} - running.dropped.keys()
        for earlier, (stage, consumed) in self._batches.items():
            if stage == order.stage and (twice := positions & consumed):
                yield "batch", f"prompts {sorted(twice)} were trained on in step {earlier} and in step {order.step}"
        self._batches[order.step] = order.stage, positions
        if (record.step, record.num_groups) != (order.step, len(positions)):
            yield "batch", f"{record} is the record of a batch of {len(positions)}"
        if len(order.groups) != state.settings.stages[order.stage].prompts_per_step:
            yield "batch", f"step {order.step} was trained on {len(order.groups)} prompts"
        yield from _counted(state, order, record, positions)
        if record.settings != order.settings:
            yield "settings", f"step {order.step} was trained with {order.settings}, on record is {record.settings}"
        self.weights[order.step] = trained(self.weights[step], order)
        self._ended[order.step] = [set(over) for over in self._over]

    def diverged(self, state: State, policies: Iterable[FakePolicy]) -> Iterable[tuple[str, str]]:
        """Which weights are not what the batches on record make of the first ones.

        Args:
            state: The run's.
            policies: Those that live and are in the run.
        """
        for version, published in state.published.items():
            if version <= state.step and published.digest != self.weights[version]:
                yield "weights", f"version {version} was published as {published.digest}, not {self.weights[version]}"
        for policy in policies:
            if policy.step <= state.step and policy.digest != self.weights[policy.step]:
                yield "weights", f"{policy.name} holds other weights than those of step {policy.step}"


def _taken_back(state: State, step: int) -> Iterable[tuple[str, str]]:
    """What is wrong with having taken a run back from a step."""
    if state.step >= step:
        yield "weights", f"the run was taken back from step {step} to step {state.step}"
    for replica in state.replicas.values():
        if replica.role == "policy" and replica.step > state.step:
            yield "weights", f"{replica.name} holds weights of step {replica.step}, and the run is back at {state.step}"


def _counted(state: State, order: TrainOrder, record: StepRecord, positions: set[int]) -> Iterable[tuple[str, str]]:
    """What is wrong with the samples of a batch on record, and with those of all steps of its stage."""
    if not state.settings.stages[order.stage].uses_rollouts:
        return
    samples = [sample for group in order.groups if group.position in positions for sample in group.samples]
    scored = sum(sample.reward is not None for sample in samples)
    if record.num_samples != scored:
        yield "batch", f"step {order.step} was trained on {scored} scored samples, on record are {record.num_samples}"
    consumed = sum(each.num_samples for each in state.steps if each.stage == order.stage)
    if (counted := state.ledgers[order.stage].samples.consumed) != consumed:
        yield "batch", f"{consumed} samples were trained on in stage {order.stage}, counted are {counted}"


def _claimed(state: State) -> Iterable[tuple[str, str]]:
    """What is trained on, or waits for that, must not be older than the bound."""
    if state.outcome:
        return
    bound = state.settings.sync_max_staleness
    for group in state.ledger.finished.values():
        oldest = min((sample.oldest_version for sample in group.samples), default=state.step)
        if state.step - oldest > bound:
            yield "staleness", f"prompt {group.position} is kept for step {state.step + 1}, of version {oldest}"
    if state.running is None:
        return
    order = state.running.order
    oldest = min((sample.oldest_version for group in order.groups for sample in group.samples), default=order.step)
    if order.step - 1 - oldest > bound:
        yield "staleness", f"step {order.step} trains on samples of version {oldest}"
