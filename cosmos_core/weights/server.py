"""Answers receivers on other hosts: a thread with a ROUTER that sends slices as they lie in the snapshots.

To receivers that opened a process group, threads of their own send them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import attrs
import zmq

from cosmos_core.errors import TransportError, WeightSyncError
from cosmos_core.observe.logs import RepeatedWarning
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport import sockets
from cosmos_core.transport.addresses import host_of
from cosmos_core.transport.authentication import Keyring, serve
from cosmos_core.transport.keys import PeerRole
from cosmos_core.weights import slices, wire
from cosmos_core.weights.changes import Encoded, encode
from cosmos_core.weights.process_group import Sender
from cosmos_core.weights.snapshot import Snapshot

_LIMITS: Final = attrs.evolve(sockets.BULK, part_bytes=4 << 20)
"""A server only receives requests."""
_SERVED: Final[tuple[PeerRole, ...]] = ("rollout",)
_POLL_MS: Final = 100
MAX_GROUPS: Final = 256
"""Receivers to which slices are sent over process groups at once, each by a thread."""
_JOIN_S: Final = 1.0
"""How long `close` waits for what is still being sent."""

Answer: TypeAlias = "wire.Described | wire.Opened | wire.Slices | wire.Gone | wire.Denied"


@attrs.frozen(kw_only=True, eq=False)
class Published:
    """A snapshot with its manifest."""

    snapshot: Snapshot
    manifest: wire.Manifest


class SliceServer:
    """Serves what is published, until closed. Methods may be called from any thread."""

    def __init__(self, run_id: str, bind_host: str, keyring: Keyring | None = None) -> None:
        """Listen on a free port of `bind_host` and start to serve rollout replicas, or anyone without a `keyring`."""
        self._run_id: Final = run_id
        self._published: Final[dict[int, Published]] = {}
        self._lock: Final = threading.Lock()
        self._stop: Final = threading.Event()
        self._senders: Final[dict[bytes, Sender]] = {}
        self._leaving: list[Sender] = []
        self._denied, self._ignored = RepeatedWarning(__name__), RepeatedWarning(__name__)
        self._context: Final[sockets.Context] = zmq.Context()
        try:
            self._listener: Final = serve(keyring, self._context, bind_host, _LIMITS, _SERVED)
        except TransportError:
            self._context.term()
            raise
        self._socket: Final = self._listener.socket
        self.endpoint: Final = self._listener.endpoint
        self._thread: Final = threading.Thread(target=self._serve, name="weight-server", daemon=True)
        self._thread.start()

    @property
    def held(self) -> tuple[int, ...]:
        """Versions served, oldest first."""
        with self._lock:
            return tuple(sorted(self._published))

    def add(self, published: Published) -> Published | None:
        """Serve a snapshot from now on; returns the one of the same version that it replaces."""
        if not self._thread.is_alive():
            raise WeightSyncError(f"the weight server {self.endpoint} is not running; see the log for its error")
        with self._lock:
            replaced = self._published.get(published.manifest.version)
            self._published[published.manifest.version] = published
        return replaced

    def remove(self, is_over: Callable[[int], bool]) -> list[Published]:
        """Serve some versions no longer, and return them."""
        with self._lock:
            return [self._published.pop(version) for version in list(self._published) if is_over(version)]

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._listener.close()
        self._context.term()
        for sender in self._senders.values():
            sender.close()
        deadline = time.monotonic() + _JOIN_S
        for sender in (*self._senders.values(), *self._leaving):
            sender.join(max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(_POLL_MS):
                self._answer_next()

    def _answer_next(self) -> None:
        try:
            first, body = sockets.receive_marked(self._socket, 2)
            if self._listener.authenticator is not None and self._listener.who(first) is None:
                raise TransportError("its key may not speak here any more")  # noqa: TRY301 - told as others are
            peer, request = first.bytes, wire.CODEC.decode(b"".join(body))
        except (zmq.Again, TransportError) as error:
            self._ignored("weight server: dropped a request: %s", error)
            return
        if isinstance(request, wire.Leave):
            if request.keep and peer in self._senders:
                self._senders[peer].is_kept = True
            else:
                self._dismiss(peer)
            return
        answer, frames = self._answer(peer, request)
        sender = self._senders.get(peer)
        if sender is not None and isinstance(answer, wire.Slices):
            try:
                sender.send(answer.request, frames)
            except TransportError as error:
                answer = wire.Denied(request=answer.request, reason=str(error))
            frames = ()
        sockets.offer(self._socket, [peer, wire.CODEC.encode(answer), *frames], copy=False)

    def _answer(self, peer: bytes, request: object) -> tuple[Answer, Sequence[memoryview]]:
        if isinstance(request, wire.Describe | wire.Open) and request.run_id != self._run_id:
            return wire.Denied(request=request.request, reason=f"it serves the run {self._run_id!r}"), ()
        if isinstance(request, wire.Describe):
            return self._describe(request), ()
        if isinstance(request, wire.Open):
            return self._open(peer, request), ()
        if isinstance(request, wire.Read):
            # What comes through a process group has the size that was announced.
            return self._read(request if peer not in self._senders else attrs.evolve(request, base=None))
        return wire.Denied(request=-1, reason=f"{type(request).__name__} is not a request"), ()

    def _describe(self, request: wire.Describe) -> Answer:
        with self._lock:
            published = self._published.get(request.version)
        if published is None:
            return wire.Gone(request=request.request, held=self.held)
        return wire.Described(request=request.request, manifest=published.manifest)

    def _open(self, peer: bytes, request: wire.Open) -> Answer:
        # By its name alone: the word that it is kept came on another connection, and may still come.
        former = next((each for each, sender in self._senders.items() if sender.name == request.pair), None)
        if former is not None and self._senders[former].renew():
            self._senders[peer] = self._senders.pop(former)
            return wire.Opened(request=request.request, port=0, pair=request.pair)
        self._dismiss(peer)
        # Who was killed said nothing, and its process has another identity when it is started again.
        for gone in [each for each, sender in self._senders.items() if sender.receiver == request.receiver != ""]:
            self._dismiss(gone)
        for gone in [each for each, sender in self._senders.items() if sender.is_over]:
            del self._senders[gone]
        self._leaving = [sender for sender in self._leaving if not sender.is_over]
        kept = next((each for each, sender in self._senders.items() if sender.is_kept), None)
        if kept is not None and len(self._senders) + len(self._leaving) >= MAX_GROUPS:
            self._senders.pop(kept).close()
        if len(self._senders) + len(self._leaving) >= MAX_GROUPS:
            self._denied("weight server: refused a process group: it has %d", MAX_GROUPS)
            return wire.Denied(
                request=request.request,
                reason=f"it serves {MAX_GROUPS} receivers over process groups of their own already; ask again later, "
                "or let fewer replicas read from one publisher (sync.fan_out)",
            )
        try:
            sender = Sender(request.backend, host_of(self.endpoint), request.receiver)
        except TransportError as error:
            return wire.Denied(request=request.request, reason=str(error))
        self._senders[peer] = sender
        return wire.Opened(request=request.request, port=sender.port, pair=sender.name)

    def _dismiss(self, peer: bytes) -> None:
        sender = self._senders.pop(peer, None)
        if sender is not None:
            sender.close()
            self._leaving.append(sender)  # its thread may wait for the receiver for a while

    def _read(self, request: wire.Read) -> tuple[Answer, Sequence[memoryview]]:
        with self._lock:
            published = next((p for p in self._published.values() if p.snapshot.token == request.token), None)
            base = self._of_origin(request.base)
            # From here on no other version is written over these.
            _lent = [used.snapshot.file.lend() for used in (published, base) if used is not None]
        if published is None:
            return wire.Gone(request=request.request, held=self.held), ()
        reason = _excess(published.snapshot, request.pieces)
        if reason:
            return wire.Denied(request=request.request, reason=reason), ()
        frames = [published.snapshot.read(piece) for piece in request.pieces]
        found = [frame for frame in frames if frame is not None]
        if len(found) < len(frames):
            missing = request.pieces[frames.index(None)]
            return wire.Denied(request=request.request, reason=f"it does not hold {missing}"), ()
        if base is None:
            return wire.Slices(request=request.request), found
        pairs = zip(request.pieces, found, strict=True)
        made = [_changed(base.snapshot, published.snapshot, piece, new) for piece, new in pairs]
        encodings = tuple(encoding for encoding, _ in made)
        return wire.Slices(request=request.request, encodings=encodings), [data for _, data in made]

    def _of_origin(self, origin: wire.Origin | None) -> Published | None:
        """The version that a receiver has, if it is held; its number alone may be that of other weights."""
        if origin is None:
            return None
        published = self._published.get(origin.version)
        return published if published is not None and published.manifest.digest == origin.digest else None


def _changed(base: Snapshot, snapshot: Snapshot, piece: TensorSlice, new: memoryview) -> Encoded:
    """Encode a slice for a receiver that has `base`; whole if that lacks it, or has another dtype or shape of it."""
    old, entry = base.finds(piece), snapshot.finds(piece)
    data = base.read(piece) if old is not None and entry is not None and old.facts == entry.facts else None
    if data is None:
        return "whole", new
    return encode(data, new, snapshot.itemsizes[piece.name])


def _excess(snapshot: Snapshot, pieces: Sequence[TensorSlice]) -> str:
    """The reason why a request is too large to answer; empty if it is not."""
    nbytes = sum(slices.size(piece) * snapshot.itemsizes.get(piece.name, 0) for piece in pieces)
    if len(pieces) > wire.REQUEST_SLICES or nbytes > wire.ANSWER_BYTES:
        return f"{len(pieces)} slices of {nbytes:,} bytes are more than one answer may hold"
    return ""
