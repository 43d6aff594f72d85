"""One training step of the group: read the share, agree that all can, train, publish, report."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from cosmos_core.policy.batches.batch import Counts, MissingPayloadsError, Share, Wanted, needed, units_of
from cosmos_core.policy.batches.share import ShareReader, data_size
from cosmos_core.policy.processes.group import GradientGroup, GradientGroupError
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.metrics import IMITATION, Meter, Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.replica.utilisation import memory, peak_of
from cosmos_core.storage.parts import PartWriter
from cosmos_core.transport.directives import TrainOrder
from cosmos_core.transport.reports import HeldOutLoss, StepDone, StepFailed

_LOG: Final = logging.getLogger(__name__)

_COMPUTING: Final = ("pack_s", "old_logprobs_s", "forward_backward_s", "reduce_s", "optimizer_s")
"""The parts of a step that its utilisation is of: all but what waits for other replicas."""


def schema() -> Any:
    """The columns of a batch, a row a group, as a `pyarrow.Schema`; docs/samples.md says what they are."""
    import pyarrow as pa  # noqa: PLC0415 - where samples are written

    numbers = dict.fromkeys(("generation", "step", "attempt", "lease", "position"), pa.int64())
    lists = {"advantages": pa.float64(), "trained": pa.bool_(), "ratios": pa.list_(pa.float32())}
    return pa.schema({**numbers, **{name: pa.list_(kind) for name, kind in lists.items()}})


@attrs.frozen(kw_only=True, eq=False)
class StepRunner:
    """Runs steps.

    Attributes:
        trainer: This replica's weights.
        reader: Where its shares come from.
        num_heldout: Held-out demonstrations whose loss an order may ask for.
        samples: Keeps the advantages and ratios of rollouts; None where they are not kept, or by another process.
    """

    trainer: Trainer
    reader: ShareReader
    num_heldout: int = 0
    samples: PartWriter | None = None

    def run(
        self, order: TrainOrder, group: GradientGroup, publish: Callable[[], None], wait_s: float
    ) -> StepDone | StepFailed:
        """Train one step, on all members or on none.

        Args:
            order: What to train.
            group: Those that train it.
            publish: Called once the weights are those of the step.
            wait_s: How long this replica waited for the order.

        Raises:
            GradientGroupError: The group broke.
            TrainingError: The training itself cannot go on.
        """
        watch = Stopwatch(self.trainer.device)
        watch.add("wait_s", wait_s)
        share = Share(sequences=(), counts=Counts())
        missing: tuple[int, ...] = ()
        reason = ""
        with watch("fetch_s"):
            try:
                share = self.reader.read(order, group, self.trainer.algorithm)
            except MissingPayloadsError as error:
                missing, reason = error.leases, str(error)
        agreed = _agree(self.trainer.world, group, share, missing, reason)
        if agreed.problem:
            return StepFailed(
                step=order.step,
                attempt=order.attempt,
                generation=group.generation,
                missing=agreed.missing,
                reason=agreed.problem,
            )
        heldout = self._measured(order, group, watch)
        applied = self.trainer.train(share, agreed.totals, group, watch, agreed.imitated)
        if self.samples is not None and group.rank == 0 and any(each.samples for each in order.groups):
            trained = () if applied.skipped else needed(self.trainer.algorithm, share.batch)
            ratios = applied.ratios.read()
            rows = _rows(order, group.generation, share.batch, trained, ratios)
            self.samples.put(rows, 1024 * len(rows) + sum(each.nbytes for each in ratios.values()))
        with watch("publish_s"):
            publish()
        try:
            heldout += self._measured(order, group, watch)
        except GradientGroupError as error:
            _LOG.warning("the held-out loss at step %d was not measured: %s", order.step, error)
        _describe(applied.meter, agreed, applied.skipped, watch)
        self._measure_use(applied.meter, share, watch)
        metrics = _merge(applied.meter, self.trainer.world, group)
        return StepDone(
            step=order.step,
            attempt=order.attempt,
            generation=group.generation,
            skipped=applied.skipped,
            metrics=metrics if group.rank == 0 else {},
            dropped=share.dropped,
            details={**({} if share.imitated is None else share.imitated.details), **share.details},
            heldout=heldout,
        )

    def _measure_use(self, meter: Meter, share: Share, watch: Stopwatch) -> None:
        """Add how much of its device this process has used: the mean of all, and the most memory of any."""
        trainer, used = self.trainer, memory()
        for name, value in used.items():
            meter.peak(name, value)
        seconds = sum(watch.seconds.get(name, 0.0) for name in _COMPUTING)
        if (peak := peak_of(trainer.device)) and seconds:
            imitated = () if share.imitated is None else share.imitated.sequences
            units = [units_of(sequence.payload) for sequence in (*share.sequences, *imitated)]
            flops = trainer.flops([each.total for each in units], sum(each.decisions for each in units))
            # Processes that share sequences share the work.
            used["mfu"] = flops * data_size(trainer.world.mesh) / trainer.world.size / (seconds * peak)
            meter.add("mfu", used["mfu"], 1)
        trainer.used = used

    def measure(self, group: GradientGroup) -> HeldOutLoss:
        """The loss of the held-out demonstrations at the present weights; the same on every process of every member.

        Args:
            group: Those that share the rows; all of their processes call this.

        Raises:
            GradientGroupError: The group broke.
        """
        share = self.reader.heldout(self.num_heldout, group)
        meter = Meter()
        meter.add("loss", self.trainer.measure(share))
        meter = Meter.merged(self.trainer.world.exchange(meter.encode()))
        # Every process of a replica counts its whole share.
        meter.add("units", share.counts.decisions)
        meter.add("rows", share.counts.sequences)
        sums = Meter.merged(group.exchange(meter.encode())).sums
        return HeldOutLoss(
            version=self.trainer.step,
            loss=sums["loss"] / max(sums["units"], 1),
            num_units=int(sums["units"]),
            num_rows=int(sums["rows"]),
            dropped=share.dropped,
            details=dict(share.details),
        )

    def _measured(self, order: TrainOrder, group: GradientGroup, watch: Stopwatch) -> tuple[HeldOutLoss, ...]:
        """The held-out loss of the present weights, if the order asks for it."""
        if self.trainer.step not in order.measures:
            return ()
        with watch("heldout_s"):
            return (self.measure(group),)


@attrs.frozen(kw_only=True)
class _Agreed:
    """Counts and problems of the step, the same on every process of every member.

    Attributes:
        totals: Counts of the whole batch.
        imitated: Counts of all demonstrations beside it; None where none are imitated.
        unread: How many rows of groups have a demonstration that could not be used, by reason.
        missing: Leases that members lack.
        problem: Why they lack them; empty if none is missing.
    """

    totals: Counts
    imitated: Counts | None
    unread: Mapping[str, int]
    missing: tuple[int, ...]
    problem: str


def _agree(world: World, group: GradientGroup, share: Share, missing: tuple[int, ...], reason: str) -> _Agreed:
    """Without it a member that lacks payloads would leave the others waiting in the reduction."""
    own = {"missing": missing, "reason": reason}
    parts = [json.loads(data) for data in world.exchange(json.dumps(own).encode())]
    reasons = [f"rank {rank}: {part['reason']}" for rank, part in enumerate(parts) if part["reason"]]
    beside = share.imitated
    answer = {
        # Every process of a replica counts its whole share.
        "counts": attrs.asdict(share.counts),
        "imitated": None if beside is None else attrs.asdict(beside.counts),
        "unread": [] if beside is None else [reason for _, reason in beside.dropped],
        "missing": sorted({lease for part in parts for lease in part["missing"]}),
        "reason": reason if world.size == 1 else "; ".join(reasons),
    }
    answers = [json.loads(data) for data in group.exchange(json.dumps(answer).encode())]
    imitated = [Counts(**each["imitated"]) for each in answers if each["imitated"] is not None]
    problems = [f"member {rank}: {each['reason']}" for rank, each in enumerate(answers) if each["reason"]]
    return _Agreed(
        totals=sum((Counts(**each["counts"]) for each in answers), Counts()),
        imitated=sum(imitated, Counts()) if imitated else None,
        unread=Counter(reason for each in answers for reason in each["unread"]),
        missing=tuple(lease for each in answers for lease in each["missing"]),
        problem="; ".join(problems),
    )


def _rows(
    order: TrainOrder, generation: int, batch: Sequence[Wanted], trained: Sequence[Wanted], ratios: Mapping[int, Any]
) -> list[dict[str, Any]]:
    """Rows of `schema`: of each group the advantages of its samples, which of them were trained on, and ratios."""
    advantages = {(item.group.lease, item.index): item.advantage for item in batch}
    measured = {(item.group.lease, item.index): ratios.get(item.place) for item in trained}
    passed = {(item.group.lease, item.index) for item in trained}
    shared = {"generation": generation, "step": order.step, "attempt": order.attempt}
    rows = []
    for group in order.groups:
        names = [(group.lease, index) for index in range(len(group.samples))]
        own = {"lease": group.lease, "position": group.position, "trained": [name in passed for name in names]}
        lists = {"advantages": [*map(advantages.get, names)], "ratios": [*map(measured.get, names)]}
        rows.append({**shared, **own, **lists})
    return rows


def _merge(meter: Meter, world: World, group: GradientGroup) -> dict[str, float]:
    """The metrics of the whole batch; of this member alone if the group broke, as the step is applied all the same."""
    meter = Meter.merged(world.exchange(meter.encode()))
    try:
        meter = Meter.merged(group.exchange(meter.encode()))
    except GradientGroupError as error:
        _LOG.warning("metrics of this step are of one member only: %s", error)
    return meter.report()


def _describe(meter: Meter, agreed: _Agreed, skipped: bool, watch: Stopwatch) -> None:
    """Add what is the same on every member, and the times of the slowest."""
    totals, imitated = agreed.totals, agreed.imitated
    meter.peak("units", totals.decisions)
    meter.peak("prompt_units", totals.prompt_units)
    meter.peak("sequences", totals.sequences)
    meter.peak("trained_sequences", totals.trained)
    meter.peak("skipped_sequences", totals.sequences - totals.trained)
    if imitated is not None:
        meter.peak(f"{IMITATION}units", imitated.decisions)
        meter.peak(f"{IMITATION}sequences", imitated.sequences)
        meter.peak(f"{IMITATION}dropped", sum(agreed.unread.values()))
        for reason, number in agreed.unread.items():
            meter.peak(f"{IMITATION}dropped_{reason}", number)
    meter.peak("nonfinite", float(skipped))
    for name, seconds in watch.seconds.items():
        meter.peak(name, seconds)
