"""Messages that no replica sends: random, mutated from valid ones, or valid and of strangers. All from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

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
