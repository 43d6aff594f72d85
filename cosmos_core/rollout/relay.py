"""Passes weights on: keeps copies of what the engine loads, for other rollout replicas to read.

A copy is made of the slices as they arrive, and is served once the engine has loaded and attested them. A replica that
nobody reads from keeps none and listens to nobody.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs
import torch

from cosmos_core.errors import TransportError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.authentication import Keyring
from cosmos_core.transport.sockets import Closing
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.shards import EngineLayout
from cosmos_core.weights.snapshot import Snapshot

_LOG: Final = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class Copy:
    """A copy of one version in the making, or of none: then nothing is kept and nothing served."""

    _publisher: WeightPublisher | None = None
    _snapshot: Snapshot | None = None

    def write(self, piece: TensorSlice, data: torch.Tensor) -> None:
        """Keep a slice that arrived."""
        if self._snapshot is not None:
            self._snapshot.write(piece, data)

    def serve(self, digests: Mapping[str, int]) -> str:
        """Let others read it, now that it is loaded and attested; where, or empty."""
        if self._publisher is None or self._snapshot is None:
            return ""
        try:
            self._publisher.seal(self._snapshot, digests=digests)
        except WeightSyncError as error:
            _tell(self._snapshot.version, error)
            return ""
        return self._publisher.endpoint

    def drop(self) -> None:
        """Forget it, unless it is served."""
        if self._publisher is not None and self._snapshot is not None:
            self._publisher.discard(self._snapshot)


@attrs.define(eq=False)
class Relay(Closing):
    """The copies of one replica, of which there are none at first. Methods may be called from any thread.

    Receivers of another run are refused. It listens on `bind_host`, 0.0.0.0 for all addresses; without a keyring, in
    tests only, anyone is served. Copies lie in the directory, or in shared memory.
    """

    _run_id: str
    _bind_host: str = "127.0.0.1"
    _keyring: Keyring | None = None
    _directory: Path | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _publisher: WeightPublisher | None = attrs.field(default=None, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)

    @contextlib.contextmanager
    def copying(self, version: int, layout: EngineLayout, *, keep: bool) -> Iterator[Copy]:
        """Make a copy of a version while it is loaded; what is not served by the end is dropped.

        Where a copy that is wanted cannot be made, the log says why, and others read elsewhere.
        """
        copy = self._copy(version, layout) if keep else Copy()
        try:
            yield copy
        finally:
            copy.drop()

    def retain(self, oldest: int, *, keep: bool) -> None:
        """Drop the copies of versions before `oldest`, and the server with the last of them if none is wanted."""
        with self._lock:
            publisher = self._publisher
            if publisher is None:
                return
            publisher.retain(oldest)
            if keep or publisher.held:
                return
            self._publisher = None
        publisher.close()

    def drop_after(self, step: int) -> None:
        """Drop the copies of versions after a step that the run was taken back to."""
        with self._lock:
            if self._publisher is not None:
                self._publisher.drop_after(step)

    def close(self) -> None:
        """Drop all copies and stop serving. Idempotent."""
        with self._lock:
            publisher, self._publisher, self._is_closed = self._publisher, None, True
        if publisher is not None:
            publisher.close()

    def _copy(self, version: int, layout: EngineLayout) -> Copy:
        try:
            with self._lock:
                if self._is_closed:
                    return Copy()
                if self._publisher is None:
                    self._publisher = WeightPublisher(
                        self._run_id, self._bind_host, keyring=self._keyring, directory=self._directory
                    )
                publisher = self._publisher
            return Copy(publisher, publisher.reserve(version, layout))
        except (WeightSyncError, TransportError) as error:
            _tell(version, error)
            return Copy()


def _tell(version: int, error: WeightSyncError | TransportError) -> None:
    _LOG.warning(
        "weights version %d are not passed on to other replicas, which read them elsewhere: %s", version, error
    )
