"""Messages between a receiver and the publishers of weights; the slices follow `Slices` as raw frames.

A receiver that opened a process group gets them through it (`process_group`), and says when it leaves.

A receiver asks, a publisher answers; every answer names its request. Nothing is acknowledged: a receiver that gets no
answer asks another publisher.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import attrs

from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.codec import Codec
from cosmos_core.weights.changes import Encoding
from cosmos_core.weights.shards import ShardMap, TensorShard

Backend: TypeAlias = Literal["gloo", "nccl"]
"""Backends of a process group of publisher and receiver."""
Network: TypeAlias = Literal["zmq"] | Backend
"""How slices come to a receiver that cannot read them itself."""

SLICE_BYTES: Final = 4 << 20
"""Largest slice that a receiver asks for, hence largest frame (a single row may be larger)."""
REQUEST_BYTES: Final = 8 << 20
"""Largest answer that a receiver asks for at once."""
REQUEST_SLICES: Final = 256
ANSWER_BYTES: Final = 1 << 30
"""Largest answer that a publisher gives."""
WINDOW: Final = 4
"""Requests that a receiver leaves unanswered at one publisher."""


@attrs.frozen(kw_only=True)
class Manifest:
    """A published snapshot.

    Attributes:
        token: Random per snapshot: a file or an answer of another snapshot is recognised by it.
        digests: Digest of each whole tensor, from which `digest` follows.
        path: Its file, for receivers on the publisher's host.
    """

    version: int
    token: str
    digest: str
    digests: dict[str, int]
    path: str
    file_bytes: int
    entries: tuple[TensorShard, ...]

    def shard_map(self) -> ShardMap:
        """The shard map of the snapshot, as of one rank."""
        tensors = {entry.name: entry.facts for entry in self.entries}
        return ShardMap(tensors=tensors, ranks={0: tuple(entry.piece for entry in self.entries)})


@attrs.frozen(kw_only=True)
class Describe:
    """Ask for the manifest of a version."""

    request: int
    run_id: str
    version: int


@attrs.frozen(kw_only=True)
class Origin:
    """A version that a receiver has, with the digest of the whole model, by which its content is known."""

    version: int
    digest: str


@attrs.frozen(kw_only=True)
class Read:
    """Ask for slices of a snapshot; with `base`, what changed since that version is enough."""

    request: int
    token: str
    pieces: tuple[TensorSlice, ...]
    base: Origin | None = None


@attrs.frozen(kw_only=True)
class Open:
    """Ask that slices come through a process group of the two from now on.

    Attributes:
        backend: Its kind.
        pair: Name of the one that an earlier fetch kept, to go on; empty if there is none.
        receiver: Name of who asks, of whose earlier processes nothing is left then; empty for none.
    """

    request: int
    run_id: str
    backend: Backend
    pair: str = ""
    receiver: str = ""


@attrs.frozen(kw_only=True)
class Leave:
    """Tell that nothing more is asked for; there is no answer. With `keep`, the process group stays for later."""

    request: int
    keep: bool = False


@attrs.frozen(kw_only=True)
class Opened:
    """The publisher waits for the receiver at this port of its own address; at 0, the pair that was named goes on."""

    request: int
    port: int
    pair: str = ""


@attrs.frozen(kw_only=True)
class Described:
    """The manifest asked for."""

    request: int
    manifest: Manifest


@attrs.frozen(kw_only=True)
class Slices:
    """The slices asked for, C-contiguous, in the order of the request: a frame each, or through the process group.

    `encodings` says for each how it follows from the base that was named; it is empty where the publisher does not
    have that base, and all are whole.
    """

    request: int
    encodings: tuple[Encoding, ...] = ()


@attrs.frozen(kw_only=True)
class Gone:
    """The version or snapshot asked for is not held (any more); `held` are the versions that are."""

    request: int
    held: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Denied:
    """The request cannot be answered, and why."""

    request: int
    reason: str


CODEC: Final = Codec((Describe, Read, Open, Leave, Opened, Described, Slices, Gone, Denied))
