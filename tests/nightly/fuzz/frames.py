"""Messages that no replica sends: random, mutated from valid ones, or valid and of strangers. All from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import msgspec

from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.frames import REQUESTS, Fetch
from cosmos_core.transport.messages import UP, WIRE_VERSION, Beat, Command, Hello, Inquire, Reports, Up, Watch
from cosmos_core.weights import wire

HUGE = (b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
"""MessagePack headers of a map, an array, a text and bytes of 4 GiB."""
NUMBERS = (-1, -(2**63), 2**63 - 1, 2**64 - 1, float("nan"), float("inf"), -0.0, 2**53 + 1)
OTHERS = (None, True, "", "x" * 300, "a\nb", "\x1b[2J", b"\xff", [], {}, [[]], {"": None})


def nested(depth: int) -> bytes:
    """Arrays in arrays."""
    return b"\x92\xa5Hello" + b"\x91" * depth


class Malformed:
    """An endless source of messages.

    Args:
        seed: Equal seeds make equal messages.
        valid: Encoded messages to begin with; as they are, they must change nothing.
        names: Names of classes.
    """

    def __init__(self, seed: int, valid: Sequence[bytes], names: Sequence[str]) -> None:
        self.random = random.Random(seed)
        self.valid = list(valid)
        self.names = list(names)
        self.kinds = (
            self.noise,
            self.cut,
            self.flipped,
            self.flipped,
            self.grown,
            self.swapped,
            self.field,
            self.field,
            self.huge,
            self.deep,
            self.stranger,
        )

    def __iter__(self) -> Iterator[list[bytes]]:
        """Messages, as parts."""
        while True:
            body = self.random.choice(self.kinds)()
            if self.random.random() < 0.05:
                yield [self.random.choice((b"", body)) for _ in range(self.random.randint(2, 9))]
            else:
                yield [body]

    def one(self) -> bytes:
        return self.random.choice(self.valid)

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.randint(0, 120))

    def cut(self) -> bytes:
        data = self.one()
        return data[: self.random.randrange(len(data))]

    def flipped(self) -> bytes:
        data = bytearray(self.one())
        for _ in range(self.random.randint(1, 4)):
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def grown(self) -> bytes:
        data = self.one()
        at = self.random.randrange(len(data) + 1)
        return data[:at] + self.noise() + data[at:]

    def swapped(self) -> bytes:
        """The fields of one class under the name of another."""
        _, body = msgspec.msgpack.decode(self.one())
        return msgspec.msgpack.encode([self.random.choice(self.names), body])

    def field(self) -> bytes:
        """A value that does not belong there: another type, out of bounds, or a field too few or too many."""
        name, body = msgspec.msgpack.decode(self.one())
        if not isinstance(body, dict) or not body:
            return self.noise()
        key = self.random.choice(list(body))
        match self.random.randrange(4):
            case 0:
                del body[key]
            case 1:
                body[key] = self.random.choice(NUMBERS)
            case 2:
                body[key] = self.random.choice(OTHERS)
            case _:
                body[key] = [body[key]] * self.random.randint(1, 3)
        return msgspec.msgpack.encode([name, body])

    def huge(self) -> bytes:
        data = self.one()
        at = self.random.randrange(len(data))
        return data[:at] + self.random.choice(HUGE) + data[at:]

    def deep(self) -> bytes:
        return nested(self.random.choice((10, 1_000, 20_000)) if self.random.random() < 0.02 else 5)

    def stranger(self) -> bytes:
        return self.one()


NOBODY: Final = "rollout-55"
"""No flipped bit makes it a name of a run."""


def stranger() -> Hello:
    """A replica that nobody knows asks to join another run."""
    return Hello(
        wire=WIRE_VERSION,
        run_id="run-of-others",
        name=NOBODY,
        role="rollout",
        incarnation="nobody",
        host="h",
        pid=1,
        step=0,
        endpoints={"payloads": "tcp://127.0.0.1:1/t"},
    )


def as_replica(run_id: str) -> list[bytes]:
    """What a replica says, to begin with, that changes nothing."""
    return [UP.encode(each) for each in _as_replica(run_id)]


def _as_replica(run_id: str) -> list[Up]:
    hello = stranger()
    failed = b"\x92\xa6Failed\x81\xa6reason\xa1x"
    return [
        hello,
        attrs.evolve(hello, run_id=run_id, wire=WIRE_VERSION - 1, name="policy-0", role="policy"),
        Beat(name="rollout-0", incarnation="of before", term=0, revision=-0, gauges={"speed": 1.0}),
        Beat(name="policy-0", incarnation="nobody", term=1, revision=3, gauges={}),
        Reports(name="rollout-0", incarnation="of before", term=1, first=1, reports=(failed,)),
        Reports(name="rollout-7", incarnation="nobody", term=9, first=7, reports=(b"", b"x")),
        Watch(run_id=run_id, after=0),
        Inquire(run_id=run_id),
        Command(run_id=run_id, ident="stop", request=b"\x92\xa4Stop\x80"),
    ]


def as_person(run_id: str) -> list[bytes]:
    """What a person asks, to begin with, that changes nothing."""
    asked = [
        Watch(run_id="run-of-others", after=0),
        Watch(run_id=run_id, after=2**40),
        Inquire(run_id="run-of-others"),
        Inquire(run_id=run_id),
        Command(run_id="run-of-others", ident="stop", request=b"\x92\xa4Stop\x80"),
        Command(run_id=run_id, ident="c", request=b"\x92\xa5Drain\x81\xa4name\xaarollout-55"),
        Command(run_id=run_id, ident="d", request=b"\x92\xa5Drain"),
        *_as_replica(run_id)[:4],
    ]
    return [UP.encode(each) for each in asked]


def of_payloads(token: str) -> list[bytes]:
    """Requests for payloads to begin with, of who knows the token of an endpoint."""
    asked = (
        Fetch(token="of others", request=1, leases=(1, 2)),
        Fetch(token="", request=-1, leases=tuple(range(-5, 300))),
        Fetch(token=token, request=3, leases=(5, 6, 2**60)),
    )
    return [REQUESTS.encode(each) for each in asked]


def of_weights(run_id: str, token: str, piece: TensorSlice) -> list[bytes]:
    """Requests for weights to begin with, of who knows the token of a snapshot, and a slice of two axes in it."""
    strange = [
        attrs.evolve(piece, start=(-1, 5)),
        attrs.evolve(piece, shape=(2**40, 2**40)),
        attrs.evolve(piece, shape=(-2, 3)),
        attrs.evolve(piece, start=(0,), shape=(2,)),
        attrs.evolve(piece, start=(), shape=()),
        attrs.evolve(piece, name="v"),
    ]
    asked = [
        wire.Describe(request=1, run_id=run_id, version=1),
        wire.Describe(request=-1, run_id="run-of-others", version=-1),
        wire.Read(request=2, token=token, pieces=(piece,), base=wire.Origin(version=1, digest="x")),
        *(wire.Read(request=3, token=token, pieces=(piece, each)) for each in strange),
        wire.Open(request=4, run_id="run-of-others", backend="gloo"),
        wire.Leave(request=5),
        wire.Gone(request=6, held=(1,)),
    ]
    return [wire.CODEC.encode(each) for each in asked]
