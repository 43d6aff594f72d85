"""The policy replica carries out its directives, one thing at a time, on the main thread.

Every process of a replica runs this, on the same directives.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.devices import has_failed
from cosmos_core.errors import AttestationError, ProcessLostError
from cosmos_core.models.parallel.lora import published_tensors
from cosmos_core.policy.batches.share import data_size
from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.saver import CheckpointSaver
from cosmos_core.policy.orders import Orders
from cosmos_core.policy.processes.group import GradientGroup, GradientGroupError
from cosmos_core.policy.processes.rendezvous import form_group
from cosmos_core.policy.publication import Publications
from cosmos_core.policy.training.gradients import stored
from cosmos_core.policy.training.step import StepRunner
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.replica.profiler import Profiler
from cosmos_core.replica.turns import RoleLock, Turns
from cosmos_core.transport.directives import GenerationOrder, PolicyDirective, TrainOrder
from cosmos_core.transport.reports import GenerationFailed, GenerationFormed, Left, Slept, StepDone
from cosmos_core.types import Scalar
from cosmos_core.weights.staging import settle
from cosmos_core.weights.storages import Sleeper

UNKNOWN_STEP: Final = -1
"""Step of a trainer whose state is a mixture: it takes part in no training until it was overwritten as a whole."""


def transfer_state(trainer: Trainer, group: GradientGroup, source: int, begin_stage: Callable[[int], None]) -> None:
    """Copy the state of member `source` to all others, each process from the one of its rank.

    Args:
        trainer: This member's.
        group: The members.
        source: Rank of the one whose state all take.
        begin_stage: Makes the trainer take up a stage, by index.

    Raises:
        GradientGroupError: The group broke. The state of a member that is not the source may then be partial: its
            step is `UNKNOWN_STEP`, so that it can only go on from a next transfer.
    """
    place = [trainer.step, trainer.stage.index, trainer.nonfinite_steps, trainer.unimitated_steps]
    step, stage, nonfinite_steps, unimitated_steps = json.loads(group.exchange(json.dumps(place).encode())[source])
    if group.rank != source:
        trainer.step = UNKNOWN_STEP
    if stage != trainer.stage.index:
        begin_stage(stage)
    group.copy([piece for tensor in trainer.state().values() for piece in stored(tensor)], source)
    trainer.step = step
    trainer.nonfinite_steps = nonfinite_steps
    trainer.unimitated_steps = unimitated_steps


_LOG: Final = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""Longest wait for a directive before looking at the background threads."""


@attrs.define(kw_only=True, eq=False)
class PolicyReplica:
    """Reconciles directives until it is told to stop.

    Attributes:
        name: The replica's name.
        run_id: The run.
        address: IP address of this machine for the gradient group.
        orders: Directives of the controller.
        trainer: The weights.
        runner: Runs steps.
        publications: Publishes versions.
        saver: Writes checkpoints.
        begin_stage: Makes the trainer take up a stage, by index.
        restore: Loads a checkpoint, by its path.
        adopt: Makes the trainer go by values of dynamic keys.
        profiler: Traces steps.
        turns: Keeps it to turns, where it shares its GPU.
    """

    name: str
    run_id: str
    address: str
    orders: Orders
    trainer: Trainer
    runner: StepRunner
    publications: Publications
    saver: CheckpointSaver
    begin_stage: Callable[[int], None]
    restore: Callable[[str], None]
    adopt: Callable[[Mapping[str, Scalar]], None]
    profiler: Profiler
    turns: Turns | None = None
    _group: GradientGroup | None = attrs.field(default=None, init=False)
    _settled_generation: int = attrs.field(default=0, init=False)
    _saved: int = attrs.field(default=-1, init=False)
    _answered: tuple[int, int, int] | None = attrs.field(default=None, init=False)
    _last: StepDone | None = attrs.field(default=None, init=False)
    _idle_since: float = attrs.field(factory=time.perf_counter, init=False)

    def run(self) -> None:
        """Work until the directive says stop or leave.

        Raises:
            CosmosError: The replica cannot go on.
        """
        while True:
            directive = self.orders.next(POLL_S)
            self.publications.check()
            self.saver.check()
            if directive is None:
                continue
            if directive.stop or directive.leave:
                break
            self.profiler.order = directive.profile
            self._reconcile(directive)
        self.profiler.finish()
        self.saver.wait()
        self.publications.close()
        if directive.leave and not directive.stop:
            _LOG.info("leaving the run, as the controller says")
            self.orders.report(Left())

    def _reconcile(self, directive: PolicyDirective) -> None:
        self.publications.retain(directive.retain)
        if self.turns is not None:
            if directive.sleep and not self.turns.is_asleep:
                self._publish_and_save(directive)
            if self.turns.follow(directive.turn, sleep=directive.sleep):
                self.orders.report(Slept(turn=directive.turn))
            if directive.sleep:
                return
        if directive.generation is not None:
            self._join(directive.generation)
        self._publish_and_save(directive)
        if directive.train is not None and self._group is not None:
            self._train(directive.train, self._group)
            self._publish_and_save(directive)

    def _publish_and_save(self, directive: PolicyDirective) -> None:
        step = self.trainer.step
        if self.publications.newest < directive.publish <= step:
            with self.trainer.activity.doing(f"publishing version {step}"):
                self._publish()
        # Every member holds the same state: the first one writes it.
        is_first = self._group is not None and self._group.rank == 0
        if is_first and 0 <= directive.checkpoint == step != self._saved:
            self._saved = step
            place = Place(
                run_id=self.run_id,
                step=step,
                stage=self.trainer.stage.index,
                nonfinite_steps=self.trainer.nonfinite_steps,
                unimitated_steps=self.trainer.unimitated_steps,
                below=self.trainer.below,
                generation=self._settled_generation,
            )
            with self.trainer.activity.doing(f"copying the checkpoint of step {step}"):
                self.saver.save(self.trainer.state(), place)

    def _publish(self) -> None:
        with self.trainer.published():
            self.publications.publish(self.trainer.step, *published_tensors(self.trainer.module))

    def _join(self, order: GenerationOrder) -> None:
        """Become a member of a generation, once; older ones and ones that failed are over."""
        if order.generation <= self._settled_generation:
            return
        self._settled_generation = order.generation
        if self._group is not None:
            self._group.close()
            self._group = None
        if self.name not in order.members:
            return
        settle()
        if order.checkpoint and self.trainer.step != order.step:
            _LOG.info("going on from %s", order.checkpoint)
            with self.trainer.activity.doing(f"loading the checkpoint of step {order.step}"):
                self.restore(order.checkpoint)
        try:
            group = form_group(
                generation=order.generation,
                rank=order.members.index(self.name),
                size=len(order.members),
                store=order.store,
                address=self.address,
                device=self.trainer.state_device,
                interrupted=lambda: self.orders.is_pointless(order.generation),
                world=self.trainer.world,
                activity=self.trainer.activity,
            )
            if order.transfer and group.size > 1:
                with self.trainer.activity.doing(f"taking over the weights of {order.members[order.source]}"):
                    transfer_state(self.trainer, group, order.source, self.begin_stage)
        except GradientGroupError as error:
            self._fail_generation(error)
            return
        if group.rank == 0:
            self.saver.drop_undone(order.step, order.generation)
        self._group = group
        self.orders.set_step(self.trainer.step)
        _LOG.info("generation %d: replica %d of %d", order.generation, group.rank, group.size)
        self.orders.report(GenerationFormed(generation=order.generation, step=self.trainer.step))

    def _train(self, order: TrainOrder, group: GradientGroup) -> None:
        key = (order.step, order.attempt, group.generation)
        if key == self._answered or order.step > self.trainer.step + 1:
            return
        self._answered = key
        if order.step <= self.trainer.step:
            # A step that was applied before its group broke is done, whatever the attempt that asks for it now.
            if (last := self._last) is not None and order.step == last.step == self.trainer.step:
                self.orders.report(attrs.evolve(last, attempt=order.attempt, generation=group.generation))
            return
        if order.stage != self.trainer.stage.index:
            self.begin_stage(order.stage)
        self.adopt(order.settings)
        try:
            wait_s = time.perf_counter() - self._idle_since
            publish = self._publish if order.publish else lambda: None
            doing = self.trainer.activity.doing(f"training step {order.step}, attempt {order.attempt}")
            with doing, self.profiler.step(order.step):
                outcome = self.runner.run(order, group, publish, wait_s)
                if not isinstance(outcome, StepDone):
                    self.profiler.repeat()
        except GradientGroupError as error:
            self._fail_generation(error)
            return
        finally:
            self._idle_since = time.perf_counter()
        if isinstance(outcome, StepDone):
            self._last = outcome
            self.orders.set_step(order.step)
        self.orders.report(outcome)

    def _fail_generation(self, error: GradientGroupError) -> None:
        if has_failed(error):
            raise error
        _LOG.warning("%s", error)
        self._group = None
        self.orders.report(GenerationFailed(generation=self._settled_generation, reason=str(error)))


def make_turns(lock: RoleLock, trainer: Trainer, folder: Path) -> Turns:
    """The turns of a process of the policy, which goes to sleep; `folder` is where the memory of a CPU goes."""
    sleeper = Sleeper(folder)

    def sleep() -> None:
        trainer.sleep(sleeper)
        # Of all processes of the replica, before anybody is told.
        trainer.world.exchange(b"")

    def wake() -> None:
        try:
            sleeper.wake()
        except AttestationError as error:
            raise ProcessLostError(f"{error}; the replica ends, and another takes its place") from error

    return Turns(lock, sleep=sleep, wake=wake)


class UnitRate:
    """Gauges of a replica, asked for by another thread."""

    def __init__(self, trainer: Trainer, turns: Turns | None = None) -> None:
        self._trainer = trainer
        self._turns = turns
        # Shares are balanced, so this process's units are those of each other that has sequences of its own.
        self._processes = data_size(trainer.world.mesh)
        self._seen = (time.perf_counter(), 0)

    def __call__(self) -> dict[str, float]:
        """The step, the units a second since the last call, and how much of its device the leader uses."""
        now, units = time.perf_counter(), self._trainer.num_units * self._processes
        then, before = self._seen
        self._seen = (now, units)
        return {
            "step": self._trainer.step,
            "tokens_per_s": (units - before) / max(now - then, 1e-9),
            **self._trainer.used,
            **({} if self._turns is None else self._turns.gauges()),
        }
