"""Reads rows of a dataset as demonstrations to train on.

Rows that are costly to encode are read once among the processes that share sequences: a video goes through an
autoencoder, which takes seconds, and its latents are a few MB. Processes of one `cp` axis encode different rows and
pass them on, one each at a time, so that no more than a row of each is on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import msgspec

from cosmos_core.config.schema import DatasetConfig
from cosmos_core.errors import DataError
from cosmos_core.models.parallel.channel import Channel
from cosmos_core.policy.batches.batch import TrainSequence, units_of
from cosmos_core.protocols import Dataset, Model, Split
from cosmos_core.protocols.layout import Mesh
from cosmos_core.protocols.world import WorldModel
from cosmos_core.transport.bounds import DETAIL, sendable
from cosmos_core.transport.frames import PayloadHeader, pack, unpack
from cosmos_core.types import Payload, Prompt

_LOG: Final = logging.getLogger(__name__)

TOO_LONG: Final = "prompt_too_long"
BAD_ROW: Final = "bad_row"


@attrs.frozen(kw_only=True)
class Row:
    """A demonstration: where it is, and what is learned of it.

    Attributes:
        split: Of the dataset,
        row: and its number there.
        name: The number that it is reported under.
        seed: Of the points at which it is learned, by a model that draws them (`WorldModel`).
        is_rejected: Whether it is the rejected one of a pair.
    """

    split: Split
    row: int
    name: int
    seed: int
    is_rejected: bool = False

    @property
    def key(self) -> tuple[Split, int, bool]:
        """The part that is the same of rows that differ only in the points at which they are learned."""
        return self.split, self.row, self.is_rejected


@attrs.frozen(kw_only=True)
class Read:
    """The units of a row, or why it is dropped: the kind of reason, and the detail."""

    decisions: int = 0
    conditioning: int = 0
    reason: str = ""
    detail: str = ""


@attrs.define(kw_only=True, eq=False)
class RowReader:
    """Reads the rows of one step, each that is asked for again once only.

    Attributes:
        model: Encodes them.
        dataset: Has them.
        longest: Most units of a sequence of tokens. Latents have no such limit: a model splits them over micro-batches.
        config: Which lengths of prompts are trained on.
        advance: Called once a row is read, which is progress.
    """

    model: Model
    dataset: Dataset
    longest: int
    config: DatasetConfig | None
    advance: Callable[[], object] = lambda: None
    _encoded: dict[tuple[Split, int, bool], Payload] = attrs.field(factory=dict, init=False)

    def look(self, row: Row) -> Read:
        """Read a row, and say its units or why it is dropped."""
        try:
            payload = self._payload(row)
            units = units_of(payload)
        except DataError as error:
            return _refused(row, BAD_ROW, str(error))
        unfit, why = self.config.unfit(units.conditioning) if self.config is not None else ("", "")
        if unfit and row.split == "train":
            return _refused(row, unfit, why)
        if payload.kind == "tokens" and units.total > self.longest:
            return _refused(row, TOO_LONG, f"{units.total} units are more than the {self.longest} that fit")
        return Read(decisions=units.decisions, conditioning=units.conditioning + units.others)

    def sequence(self, row: Row, place: int) -> TrainSequence:
        """A row to train on.

        Raises:
            DataError: It cannot be used, though another process could.
        """
        return TrainSequence(payload=self._payload(row), advantage=-1.0 if row.is_rejected else 1.0, place=place)

    def held(self, row: Row) -> Payload | None:
        """A row that was read, without the points at which it is learned; None where it could not be."""
        return self._encoded.get(row.key)

    def keep(self, row: Row, payload: Payload) -> None:
        """Take a row as another process read it (see `held`)."""
        self._encoded[row.key] = payload

    def _payload(self, row: Row) -> Payload:
        if row.key not in self._encoded:
            self._encoded[row.key] = self.model.encode_demonstration(self._prompt(row))
            self.advance()
        payload = self._encoded[row.key]
        return self.model.noised(payload, row.seed) if isinstance(self.model, WorldModel) else payload

    def _prompt(self, row: Row) -> Prompt:
        prompt = self.dataset.row(row.split, row.row)
        if not row.is_rejected:
            return prompt
        if prompt.rejected is None:
            raise DataError("the row has no rejected completion, and the algorithm learns from preferences")
        return attrs.evolve(prompt, demonstration=prompt.rejected)


def _refused(row: Row, reason: str, why: str) -> Read:
    detail = sendable(f"{row.split} row {row.row}: {why}")
    _LOG.warning("%s", detail)
    return Read(reason=reason, detail=detail[:DETAIL])


@attrs.frozen(kw_only=True)
class _Passed:
    """A row that another process has read.

    Attributes:
        read: What it amounts to.
        headers: Of its payload; none where it cannot be used.
        frames: Bytes of that.
    """

    read: Read
    headers: tuple[PayloadHeader, ...]
    frames: tuple[bytes, ...]


def look_together(reader: RowReader, rows: Mapping[int, Row], mesh: Mesh) -> dict[int, Read]:
    """Look at rows, each read by one of the processes along `cp`; afterwards all of them have it.

    Args:
        reader: This process's.
        rows: By index; the same on each of these processes, which all call it.
        mesh: The processes.
    """
    size = mesh.size("cp")
    if size == 1:
        return {index: reader.look(row) for index, row in rows.items()}
    channel, place = Channel(mesh.group("cp")), mesh.place("cp")
    # Rows that are learned at several points are read once.
    different = [*{row.key: row for row in rows.values()}.values()]
    reads: dict[tuple[object, ...], Read] = {}
    for first in range(0, len(different), size):
        turn = different[first : first + size]
        own = reader.look(turn[place]) if place < len(turn) else None
        said = channel.exchange(b"" if own is None else _told(own, reader.held(turn[place])))
        for number, (row, data) in enumerate(zip(turn, said, strict=False)):
            if number == place and own is not None:
                reads[row.key] = own
            else:
                reads[row.key] = _taken(reader, row, data)
    return {index: reads[row.key] for index, row in rows.items()}


def _told(read: Read, payload: Payload | None) -> bytes:
    packed = pack([] if payload is None else [payload])
    frames = tuple(bytes(frame) for frame in packed.frames)
    return msgspec.msgpack.encode(_Passed(read=read, headers=packed.payloads, frames=frames))


def _taken(reader: RowReader, row: Row, data: bytes) -> Read:
    passed = msgspec.msgpack.decode(data, type=_Passed)
    for payload in unpack(passed.headers, [memoryview(frame) for frame in passed.frames]):
        reader.keep(row, payload)
    return passed.read
