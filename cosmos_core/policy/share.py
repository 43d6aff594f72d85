"""Getting hold of a replica's share of a step: payloads from the sample plane, or rows of the dataset."""

from __future__ import annotations

import logging
from typing import Final

import attrs

from cosmos_core.errors import DataError, TransportError
from cosmos_core.policy.batch import (
    Counts,
    MissingPayloadsError,
    Share,
    TrainSequence,
    needed,
    requests,
    rollout_share,
    wanted_samples,
)
from cosmos_core.protocols import Algorithm, Dataset, Model
from cosmos_core.transport.messages import TrainOrder
from cosmos_core.transport.payloads import PayloadClient

FETCH_TIMEOUT_S: Final = 60.0

_LOG: Final = logging.getLogger(__name__)


class _TooLongError(DataError):
    """A demonstration that no forward can take."""


@attrs.frozen(kw_only=True, eq=False)
class ShareReader:
    """Reads shares.

    Attributes:
        model: Encodes demonstrations.
        payloads: The line to the rollout replicas.
        dataset: Rows of demonstrations; None where no stage learns from them.
        longest: Most units of a demonstration that can be trained on.
    """

    model: Model
    payloads: PayloadClient
    dataset: Dataset | None
    longest: int

    def read(self, order: TrainOrder, rank: int, algorithm: Algorithm) -> Share:
        """The share of the member of this rank.

        Raises:
            MissingPayloadsError: Payloads could not be fetched.
        """
        indices = order.shares[rank]
        if order.groups and not order.groups[0].endpoint:
            return self._demonstrations(order, indices)
        wanted = wanted_samples(algorithm, order.groups, indices)
        trained = needed(algorithm, wanted)
        leases = requests(trained)
        try:
            held = self.payloads.fetch(leases, FETCH_TIMEOUT_S)
        except TransportError as error:
            raise MissingPayloadsError([lease for some in leases.values() for lease in some], str(error)) from error
        return rollout_share(wanted, trained, held)

    def _demonstrations(self, order: TrainOrder, indices: tuple[int, ...]) -> Share:
        sequences: list[TrainSequence] = []
        dropped: list[tuple[int, str]] = []
        counts = Counts()
        for group in (order.groups[index] for index in indices):
            try:
                sequence, sizes = self._demonstration(group.row)
            except _TooLongError as error:
                dropped.append((group.position, "prompt_too_long"))
                _LOG.warning("%s", error)
            except DataError as error:
                dropped.append((group.position, "bad_row"))
                _LOG.warning("row %d: %s", group.row, error)
            else:
                sequences.append(sequence)
                counts += sizes
        return Share(sequences=tuple(sequences), counts=counts, dropped=tuple(dropped))

    def _demonstration(self, row: int) -> tuple[TrainSequence, Counts]:
        assert self.dataset is not None, "a stage of demonstrations has a dataset"
        payload = self.model.encode_demonstration(self.dataset.row("train", row))
        prompt, completion = (payload.arrays[name].shape[0] for name in ("prompt", "completion"))
        if prompt + completion > self.longest:
            raise _TooLongError(f"row {row}: {prompt + completion} units are more than the {self.longest} that fit")
        counts = Counts(sequences=1, decisions=completion, prompt_units=prompt, trained=1)
        return TrainSequence(payload=payload, advantage=1.0), counts
