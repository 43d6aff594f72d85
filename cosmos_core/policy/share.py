"""Getting hold of a step's sequences: payloads from the sample plane, or rows of the dataset.

A replica's share is shared again among its processes, by units. Processes that work on the same sequences (`pp`, `cp`
and `tp`) read the same ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.errors import DataError, TransportError
from cosmos_core.policy.balance import balanced
from cosmos_core.policy.batch import (
    Counts,
    MissingPayloadsError,
    Share,
    TrainSequence,
    Wanted,
    counts_of,
    needed,
    requests,
    rollout_sequences,
    wanted_samples,
)
from cosmos_core.policy.world import World
from cosmos_core.protocols import Algorithm, Dataset, Model
from cosmos_core.transport.messages import GroupRef, TrainOrder
from cosmos_core.transport.payloads import PayloadClient
from cosmos_core.types import Payload

FETCH_TIMEOUT_S: Final = 60.0

_LOG: Final = logging.getLogger(__name__)

TOO_LONG: Final = "prompt_too_long"
BAD_ROW: Final = "bad_row"


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
    """

    model: Model
    payloads: PayloadClient
    dataset: Dataset | None
    longest: int
    world: World

    def read(self, order: TrainOrder, rank: int, algorithm: Algorithm) -> Share:
        """This process's part of the share of the replica of this rank.

        Raises:
            MissingPayloadsError: Payloads could not be fetched.
        """
        indices = order.shares[rank]
        if order.groups and not order.groups[0].endpoint:
            return self._demonstrations([order.groups[index] for index in indices])
        wanted = wanted_samples(algorithm, order.groups, indices)
        trained = needed(algorithm, wanted)
        mine, filler = self._mine([item.sample.num_prompt_units + item.sample.num_units for item in trained])
        sequences = self._fetched([trained[index] for index in (*mine, *filler)])
        return Share(
            sequences=sequences[: len(mine)],
            counts=counts_of(wanted, trained),
            filler=sequences[-1] if filler else None,
        )

    def _mine(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Indices of this process's sequences, and that of a filler if it has none where others have some."""
        mesh = self.world.mesh
        shares = mesh.size("dp_replicate") * mesh.size("dp_shard")
        place = mesh.place("dp_replicate") * mesh.size("dp_shard") + mesh.place("dp_shard")
        mine = balanced(lengths, shares)[place]
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

    def _demonstrations(self, groups: Sequence[GroupRef]) -> Share:
        """Every process encodes some rows, all learn their lengths, then each encodes those that are its own."""
        encoded: dict[int, Payload] = {}
        reads: dict[int, _Read] = {}
        for index in range(self.world.rank, len(groups), self.world.size):
            reads[index] = self._encode(groups[index].row, encoded, index)
        reads = self._exchange(reads)
        good = [index for index in range(len(groups)) if not reads[index].reason]
        mine, filler = self._mine([reads[index].prompt + reads[index].completion for index in good])
        sequences = [self._sequence(groups[good[place]].row, encoded, good[place]) for place in (*mine, *filler)]
        return Share(
            sequences=tuple(sequences[: len(mine)]),
            counts=Counts(
                sequences=len(good),
                decisions=sum(reads[index].completion for index in good),
                prompt_units=sum(reads[index].prompt for index in good),
                trained=len(good),
            ),
            filler=sequences[-1] if filler else None,
            dropped=tuple(
                (groups[index].position, read.reason) for index, read in sorted(reads.items()) if read.reason
            ),
        )

    def _exchange(self, reads: dict[int, _Read]) -> dict[int, _Read]:
        """What all processes of the replica read."""
        own = json.dumps([(index, attrs.asdict(read)) for index, read in reads.items()]).encode()
        answers = [json.loads(data) for data in self.world.exchange(own)]
        return {index: _Read(**read) for answer in answers for index, read in answer}

    def _encode(self, row: int, encoded: dict[int, Payload], index: int) -> _Read:
        assert self.dataset is not None, "a stage of demonstrations has a dataset"
        try:
            payload = self.model.encode_demonstration(self.dataset.row("train", row))
        except DataError as error:
            _LOG.warning("row %d: %s", row, error)
            return _Read(reason=BAD_ROW)
        prompt, completion = (payload.arrays[name].shape[0] for name in ("prompt", "completion"))
        if prompt + completion > self.longest:
            _LOG.warning("row %d: %d units are more than the %d that fit", row, prompt + completion, self.longest)
            return _Read(reason=TOO_LONG)
        encoded[index] = payload
        return _Read(prompt=prompt, completion=completion)

    def _sequence(self, row: int, encoded: dict[int, Payload], index: int) -> TrainSequence:
        if index not in encoded:
            assert self.dataset is not None
            encoded[index] = self.model.encode_demonstration(self.dataset.row("train", row))
        return TrainSequence(payload=encoded[index], advantage=1.0)
