"""Getting hold of a step's sequences: payloads from the sample plane, or rows of the dataset.

A replica's share of rollouts is shared again among its processes, by units. The lengths of demonstrations of tokens are
known only once they are read: every process of every replica reads some, all learn all lengths, and each takes what
makes the work even. Those of latents, which are costly to encode, all have the number of decisions that the model's
options say, so that each is read by those that train on it. Those that are imitated beside rollouts lie with the groups
of their rows, and are read by who trains on them. Processes that work on the same sequences (`pp`, `cp` and `tp`) read
the same ones, each for itself: passed on through the process group, large payloads would take longer (see
benchmarks/results). Latents, which take longer to encode than to pass on, are shared out along `cp` (`together`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import attrs

from cosmos_core.config.order import demonstration_seed, evaluation_seed
from cosmos_core.config.schema import DatasetConfig
from cosmos_core.errors import TransportError
from cosmos_core.policy.batches.batch import (
    Counts,
    MissingPayloadsError,
    Share,
    TrainSequence,
    Wanted,
    balanced,
    counts_of,
    needed,
    requests,
    rollout_sequences,
    temperatures,
    wanted_samples,
)
from cosmos_core.policy.batches.rows import Read, Row, RowReader, look_together
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import Algorithm, Dataset, Model
from cosmos_core.protocols.layout import Mesh
from cosmos_core.protocols.world import WorldModel
from cosmos_core.transport.directives import TrainOrder
from cosmos_core.transport.payloads import PayloadClient

FETCH_TIMEOUT_S: Final = 60.0


@attrs.frozen(kw_only=True, eq=False)
class ShareReader:
    """Reads shares.

    Attributes:
        model: Encodes demonstrations.
        payloads: The line to the rollout replicas.
        dataset: Gives the rows of demonstrations, where a stage learns from them.
        longest: Most tokens of a demonstration that can be trained on.
        world: The processes of this replica.
        config: Which lengths of prompts are trained on.
        paired_stages: Stages that learn from preferences: each row is two sequences, the rejected one second.
        seed: `run.seed`.
        advance: Called once a row is read, which is progress.
    """

    model: Model
    payloads: PayloadClient
    dataset: Callable[[], Dataset]
    longest: int
    world: World
    config: DatasetConfig | None = None
    paired_stages: frozenset[int] = frozenset()
    seed: int = 0
    advance: Callable[[], object] = lambda: None

    def read(self, order: TrainOrder, group: GradientGroup, algorithm: Algorithm) -> Share:
        """This process's part of a step's batch.

        Args:
            order: The step.
            group: Those that share it; all of their processes call this.
            algorithm: Gives rollouts their advantages.

        Raises:
            GradientGroupError: The group broke.
            MissingPayloadsError: Payloads could not be fetched.
        """
        if order.groups and not order.groups[0].endpoint:
            kinds = (False, True) if order.stage in self.paired_stages else (False,)
            # Both of a pair are learned at the same points.
            rows = [
                self._row(order, number, is_rejected=is_rejected)
                for number in range(len(order.groups))
                for is_rejected in kinds
            ]
            return self._demonstrations(rows, group)
        # Before anything is fetched, which may fail here and nowhere else: processes tell each other what they read.
        imitated = self._imitated(order, group, algorithm)
        batch = wanted_samples(algorithm, order.groups, range(len(order.groups)))
        own = {order.groups[number].lease for number in order.shares[group.rank]}
        wanted = [item for item in batch if item.group.lease in own]
        trained = needed(algorithm, wanted)
        lengths = [item.sample.num_prompt_units + item.sample.num_units for item in trained]
        mine, filler = self._mine(balanced(lengths, data_size(self.world.mesh)), lengths, first=0)
        sequences = self._fetched([trained[index] for index in (*mine, *filler)])
        return Share(
            sequences=sequences[: len(mine)],
            counts=counts_of(wanted, trained),
            filler=sequences[-1] if filler else None,
            temperatures=temperatures(order.groups),
            imitated=imitated,
            batch=tuple(batch),
        )

    def heldout(self, number: int, group: GradientGroup) -> Share:
        """This process's part of the first held-out demonstrations, shared by all processes of the group.

        Args:
            number: How many.
            group: Those that share them; all of their processes call this.

        Raises:
            GradientGroupError: The group broke.
        """
        # With the same draws at every step, so that losses can be compared.
        rows = [Row(split="heldout", row=row, name=row, seed=evaluation_seed(self.seed, row)) for row in range(number)]
        return self._demonstrations(rows, group)

    def _mine(
        self, shares: Sequence[tuple[int, ...]], lengths: Sequence[int], *, first: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Indices of this process's sequences, and that of a filler if it has none where others have some.

        Args:
            shares: Indices of each process that has sequences of its own.
            lengths: Units of each sequence.
            first: Place in `shares` of the first process of this replica.
        """
        mine = shares[first + data_place(self.world.mesh)]
        if mine or not lengths:
            return mine, ()
        return (), (min(range(len(lengths)), key=lambda index: lengths[index]),)

    def _fetched(self, trained: Sequence[Wanted]) -> tuple[TrainSequence, ...]:
        leases = requests(trained)
        try:
            held = self.payloads.fetch(leases, FETCH_TIMEOUT_S)
        except TransportError as error:
            raise MissingPayloadsError([lease for some in leases.values() for lease in some], str(error)) from error
        return rollout_sequences(trained, held)

    def _row(self, order: TrainOrder, number: int, *, is_rejected: bool = False, again: int = 0) -> Row:
        """The demonstration of a group of the step."""
        reference = order.groups[number]
        return Row(
            split="train",
            row=reference.row,
            name=reference.position,
            seed=demonstration_seed(self.seed, order.stage, reference.position, again),
            is_rejected=is_rejected,
        )

    def _rows(self) -> RowReader:
        return RowReader(
            model=self.model, dataset=self.dataset(), longest=self.longest, config=self.config, advance=self.advance
        )

    def _looked(self, reader: RowReader, rows: Sequence[Row], indices: Iterable[int]) -> dict[int, Read]:
        """Look at rows that are this process's own, and of those that share its sequences."""
        if isinstance(self.model, WorldModel):
            return look_together(reader, {index: rows[index] for index in indices}, self.world.mesh)
        return {index: reader.look(rows[index]) for index in indices}

    def _demonstrations(self, rows: Sequence[Row], group: GradientGroup) -> Share:
        """Rows that are shared by all processes of the group.

        Every process reads some, all learn their lengths, then each reads those that are its own; of latents, whose
        lengths are all the same, each reads its own at once.
        """
        reader = self._rows()
        size = data_size(self.world.mesh)
        parted: list[tuple[int, ...]] = []
        if isinstance(self.model, WorldModel):
            parted = balanced([1] * len(rows), group.size * size)
            reads = self._looked(reader, rows, parted[group.rank * size + data_place(self.world.mesh)])
        else:
            first, each = group.rank * self.world.size + self.world.rank, group.size * self.world.size
            reads = {index: reader.look(rows[index]) for index in range(first, len(rows), each)}
        reads = _whole_pairs(rows, _read_of(group.exchange(_said(self._told(reads)))))
        good = [index for index in range(len(rows)) if not reads[index].reason]
        lengths = [reads[index].decisions + reads[index].conditioning for index in good]
        place_of = {index: place for place, index in enumerate(good)}
        shares = [tuple(place_of[index] for index in share if index in place_of) for share in parted]
        shares = shares or balanced(lengths, group.size * size)
        mine, filler = self._mine(shares, lengths, first=group.rank * size)
        sequences = [reader.sequence(rows[good[place]], good[place]) for place in (*mine, *filler)]
        own = [reads[good[place]] for share in shares[group.rank * size :][:size] for place in share]
        return Share(
            sequences=tuple(sequences[: len(mine)]),
            counts=_counts(own),
            filler=sequences[-1] if filler else None,
            dropped=_dropped(rows, reads),
            details=_details(reads),
        )

    def _imitated(self, order: TrainOrder, group: GradientGroup, algorithm: Algorithm) -> Share | None:
        """This process's part of the demonstrations of this replica's groups; None where none are imitated."""
        times = algorithm.num_demonstrations
        if times == 0:
            return None
        rows = [self._row(order, number, again=again) for number in order.shares[group.rank] for again in range(times)]
        reader = self._rows()
        own = range(data_place(self.world.mesh), len(rows), data_size(self.world.mesh))
        # Those that share sequences each read them: what one of them could not read, none trains on.
        reads = self._told(self._looked(reader, rows, own))
        good = [index for index in range(len(rows)) if not reads[index].reason]
        mine = [index for index in own if not reads[index].reason]
        return Share(
            sequences=tuple(reader.sequence(rows[index], index) for index in mine),
            counts=_counts([reads[index] for index in good]),
            filler=None if mine or not good else reader.sequence(rows[good[0]], good[0]),
            dropped=_dropped(rows, reads),
            details=_details(reads),
        )

    def _told(self, reads: Mapping[int, Read]) -> dict[int, Read]:
        """Exchange reads among the processes of this replica; a row that one of them could not read is dropped."""
        return _read_of(self.world.exchange(_said(reads)))


def _said(reads: Mapping[int, Read]) -> bytes:
    return json.dumps([(index, attrs.asdict(read)) for index, read in reads.items()]).encode()


def _read_of(answers: Sequence[bytes]) -> dict[int, Read]:
    found: dict[int, Read] = {}
    for index, read in (pair for data in answers for pair in json.loads(data)):
        if index not in found or not found[index].reason:
            found[index] = Read(**read)
    return found


def _counts(reads: Sequence[Read]) -> Counts:
    return Counts(
        sequences=len(reads),
        decisions=sum(read.decisions for read in reads),
        prompt_units=sum(read.conditioning for read in reads),
        trained=len(reads),
    )


def _dropped(rows: Sequence[Row], reads: Mapping[int, Read]) -> tuple[tuple[int, str], ...]:
    """The names of rows that cannot be used, each once, and why."""
    return tuple({rows[index].name: read.reason for index, read in sorted(reads.items()) if read.reason}.items())


def _details(reads: Mapping[int, Read]) -> dict[str, str]:
    return {read.reason: read.detail for _, read in sorted(reads.items(), reverse=True) if read.reason}


def _whole_pairs(rows: Sequence[Row], reads: dict[int, Read]) -> dict[int, Read]:
    """The same, but that one of a pair is not used without the other."""
    bad = {rows[index].name: read for index, read in sorted(reads.items(), reverse=True) if read.reason}
    return {index: bad.get(rows[index].name, read) for index, read in reads.items()}


def data_size(mesh: Mesh) -> int:
    """Processes of a replica that have sequences of their own."""
    return mesh.size("dp_replicate") * mesh.size("dp_shard")


def data_place(mesh: Mesh) -> int:
    """This process's number among them."""
    return mesh.place("dp_replicate") * mesh.size("dp_shard") + mesh.place("dp_shard")
