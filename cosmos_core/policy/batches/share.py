"""Getting hold of a step's sequences: payloads from the sample plane, or rows of the dataset.

A replica's share of rollouts is shared again among its processes, by units. The lengths of demonstrations are known
only once they are read: every process of every replica reads some, all learn all lengths, and each takes what makes
the work even. Processes that work on the same sequences (`pp`, `cp` and `tp`) read the same ones, each for itself:
passed on through the process group, large payloads would take longer (see benchmarks/results).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from cosmos_core.config.schema import DatasetConfig
from cosmos_core.errors import DataError, TransportError
from cosmos_core.policy.batches.balance import balanced
from cosmos_core.policy.batches.batch import (
    Counts,
    MissingPayloadsError,
    Share,
    TrainSequence,
    Wanted,
    counts_of,
    needed,
    requests,
    rollout_sequences,
    temperatures,
    wanted_samples,
)
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import Algorithm, Dataset, Mesh, Model, Split
from cosmos_core.transport.directives import TrainOrder
from cosmos_core.transport.payloads import PayloadClient
from cosmos_core.types import Payload, Prompt

FETCH_TIMEOUT_S: Final = 60.0

_LOG: Final = logging.getLogger(__name__)

TOO_LONG: Final = "prompt_too_long"
BAD_ROW: Final = "bad_row"


@attrs.frozen(kw_only=True)
class _Row:
    """A demonstration: where it is, the number that it is reported under, and whether it is the rejected one."""

    split: Split
    row: int
    name: int
    is_rejected: bool = False


@attrs.frozen(kw_only=True)
class _Read:
    """What became of a row: its units, or why it is dropped."""

    prompt: int = 0
    completion: int = 0
    reason: str = ""


@attrs.frozen(kw_only=True, eq=False)
class ShareReader:
    """Reads shares.

    Attributes:
        model: Encodes demonstrations.
        payloads: The line to the rollout replicas.
        dataset: Rows of demonstrations; None where no stage learns from them.
        longest: Most units of a demonstration that can be trained on.
        world: The processes of this replica.
        config: Which lengths of prompts are trained on.
        paired_stages: Stages that learn from preferences: each row is two sequences, the rejected one second.
    """

    model: Model
    payloads: PayloadClient
    dataset: Dataset | None
    longest: int
    world: World
    config: DatasetConfig | None = None
    paired_stages: frozenset[int] = frozenset()

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
            rows = [
                _Row(split="train", row=each.row, name=each.position, is_rejected=is_rejected)
                for each in order.groups
                for is_rejected in kinds
            ]
            return self._demonstrations(rows, group)
        wanted = wanted_samples(algorithm, order.groups, order.shares[group.rank])
        trained = needed(algorithm, wanted)
        lengths = [item.sample.num_prompt_units + item.sample.num_units for item in trained]
        mine, filler = self._mine(balanced(lengths, data_size(self.world.mesh)), lengths, first=0)
        sequences = self._fetched([trained[index] for index in (*mine, *filler)])
        return Share(
            sequences=sequences[: len(mine)],
            counts=counts_of(wanted, trained),
            filler=sequences[-1] if filler else None,
            temperatures=temperatures(order.groups),
        )

    def heldout(self, number: int, group: GradientGroup) -> Share:
        """This process's part of the first held-out demonstrations, shared by all processes of the group.

        Args:
            number: How many.
            group: Those that share them; all of their processes call this.

        Raises:
            GradientGroupError: The group broke.
        """
        return self._demonstrations([_Row(split="heldout", row=row, name=row) for row in range(number)], group)

    def _mine(
        self, shares: Sequence[tuple[int, ...]], lengths: Sequence[int], *, first: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Indices of this process's sequences, and that of a filler if it has none where others have some.

        Args:
            shares: Indices of each process that has sequences of its own.
            lengths: Units of each sequence.
            first: Place in `shares` of the first process of this replica.
        """
        mesh = self.world.mesh
        mine = shares[first + mesh.place("dp_replicate") * mesh.size("dp_shard") + mesh.place("dp_shard")]
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

    def _demonstrations(self, rows: Sequence[_Row], group: GradientGroup) -> Share:
        """Every process encodes some rows, all learn their lengths, then each encodes those that are its own."""
        encoded: dict[int, Payload] = {}
        first, each = group.rank * self.world.size + self.world.rank, group.size * self.world.size
        reads = {index: self._encode(rows[index], encoded, index) for index in range(first, len(rows), each)}
        reads = _whole_pairs(rows, self._exchange(reads, group))
        good = [index for index in range(len(rows)) if not reads[index].reason]
        lengths = [reads[index].prompt + reads[index].completion for index in good]
        size = data_size(self.world.mesh)
        shares = balanced(lengths, group.size * size)
        mine, filler = self._mine(shares, lengths, first=group.rank * size)
        sequences = [self._sequence(rows[good[place]], encoded, good[place]) for place in (*mine, *filler)]
        own = [reads[good[place]] for share in shares[group.rank * size :][:size] for place in share]
        return Share(
            sequences=tuple(sequences[: len(mine)]),
            counts=Counts(
                sequences=len(own),
                decisions=sum(read.completion for read in own),
                prompt_units=sum(read.prompt for read in own),
                trained=len(own),
            ),
            filler=sequences[-1] if filler else None,
            dropped=_dropped(rows, reads),
        )

    def _exchange(self, reads: dict[int, _Read], group: GradientGroup) -> dict[int, _Read]:
        """What all processes of all replicas read."""
        own = json.dumps([(index, attrs.asdict(read)) for index, read in reads.items()]).encode()
        replica = json.dumps([pair for data in self.world.exchange(own) for pair in json.loads(data)]).encode()
        return {index: _Read(**read) for data in group.exchange(replica) for index, read in json.loads(data)}

    def _encode(self, row: _Row, encoded: dict[int, Payload], index: int) -> _Read:
        try:
            payload = self.model.encode_demonstration(self._prompt(row))
        except DataError as error:
            _LOG.warning("%s row %d: %s", row.split, row.row, error)
            return _Read(reason=BAD_ROW)
        prompt, completion = (payload.arrays[name].shape[0] for name in ("prompt", "completion"))
        unfit, why = self.config.unfit(prompt) if self.config is not None and row.split == "train" else ("", "")
        if unfit:
            _LOG.warning("%s row %d: %s", row.split, row.row, why)
            return _Read(reason=unfit)
        if prompt + completion > self.longest:
            _LOG.warning(
                "%s row %d: %d units are more than the %d that fit",
                row.split,
                row.row,
                prompt + completion,
                self.longest,
            )
            return _Read(reason=TOO_LONG)
        encoded[index] = payload
        return _Read(prompt=prompt, completion=completion)

    def _sequence(self, row: _Row, encoded: dict[int, Payload], index: int) -> TrainSequence:
        if index not in encoded:
            encoded[index] = self.model.encode_demonstration(self._prompt(row))
        return TrainSequence(payload=encoded[index], advantage=-1.0 if row.is_rejected else 1.0, place=index)

    def _prompt(self, row: _Row) -> Prompt:
        assert self.dataset is not None, "a stage of demonstrations has a dataset"
        prompt = self.dataset.row(row.split, row.row)
        if not row.is_rejected:
            return prompt
        if prompt.rejected is None:
            raise DataError("the row has no rejected completion, and the algorithm learns from preferences")
        return attrs.evolve(prompt, demonstration=prompt.rejected)


def _dropped(rows: Sequence[_Row], reads: Mapping[int, _Read]) -> tuple[tuple[int, str], ...]:
    """The names of rows that cannot be used, each once, and why."""
    return tuple({rows[index].name: read.reason for index, read in sorted(reads.items()) if read.reason}.items())


def _whole_pairs(rows: Sequence[_Row], reads: dict[int, _Read]) -> dict[int, _Read]:
    """The same, but that one of a pair is not used without the other."""
    bad = {rows[index].name: read for index, read in sorted(reads.items(), reverse=True) if read.reason}
    return {index: bad.get(rows[index].name, read) for index, read in reads.items()}


def data_size(mesh: Mesh) -> int:
    """Processes of a replica that have sequences of their own."""
    return mesh.size("dp_replicate") * mesh.size("dp_shard")
