"""Publishes versions of a policy rank's weights: a snapshot on the training thread, the rest on any other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from cosmos_core.transport.authentication import Keyring
from cosmos_core.transport.reports import WeightsPublished
from cosmos_core.transport.sockets import Closing
from cosmos_core.weights import digest, wire
from cosmos_core.weights.disk import VersionWriter
from cosmos_core.weights.quantization import MatrixShare
from cosmos_core.weights.server import Published, SliceServer
from cosmos_core.weights.shards import EngineLayout, LocalShard
from cosmos_core.weights.shared_memory import SharedFile, directories_for_files, sweep
from cosmos_core.weights.snapshot import Snapshot, blank_snapshot, take_snapshot


class WeightPublisher(Closing):
    """Holds snapshots in shared memory and serves them to other hosts. Methods may be called from any thread."""

    def __init__(
        self,
        run_id: str,
        bind_host: str = "127.0.0.1",
        *,
        keyring: Keyring | None = None,
        directory: Path | None = None,
        writer: VersionWriter | None = None,
    ) -> None:
        """Start to serve, and remove what dead processes of this user left behind.

        Receivers of another run are refused. Without a keyring, as in tests and measurements, anyone is served.
        Snapshots lie in `directory`, in shared memory if absent; `writer` stores them besides, and is closed with this.
        """
        self._directory: Final = directory
        self._writer: Final = writer
        for folder in directories_for_files() if directory is None else (directory,):
            sweep(folder)
        self._staged: Final[dict[str, Snapshot]] = {}
        self._spare: SharedFile | None = None
        self._lock: Final = threading.Lock()
        self._server: Final = SliceServer(run_id, bind_host, keyring)
        self.endpoint: Final = self._server.endpoint
        """The endpoint that receivers connect to: `tcp://HOST:PORT#KEY`, for `Hello.endpoints["weights"]`."""

    @property
    def held(self) -> tuple[int, ...]:
        """Versions that receivers can read, oldest first."""
        return self._server.held

    def stage(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor | LocalShard],
        dtype: torch.dtype | None,
        *,
        quantised: Mapping[str, MatrixShare] | None = None,
    ) -> Snapshot:
        """Copy the weights, which may change after `staging.settle`. Not served before `seal`.

        Tensors, or shards of them, are by canonical name, on any device; floating-point ones are cast to `dtype`, the
        rollout's (None: as they are). `quantised` says how, for tensors that are published as codes and scales.
        """
        return self._stage(
            lambda spare: take_snapshot(
                version, tensors, dtype, quantised=quantised, directory=self._directory, spare=spare
            )
        )

    def reserve(self, version: int, layout: EngineLayout) -> Snapshot:
        """A snapshot of an engine's layout, to be written by slices; not served before `seal`, dropped by `discard`."""
        return self._stage(lambda spare: blank_snapshot(version, layout, directory=self._directory, spare=spare))

    def _stage(self, make: Callable[[SharedFile | None], Snapshot]) -> Snapshot:
        """Make a snapshot, in the file of one that was dropped if there is any; kept until `seal` or `discard`."""
        with self._lock:
            spare, self._spare = self._spare, None
        snapshot = make(spare)
        with self._lock:
            self._staged[snapshot.token] = snapshot
        return snapshot

    def discard(self, snapshot: Snapshot) -> None:
        """Drop a snapshot that is not sealed; one that is sealed stays."""
        with self._lock:
            found = self._staged.pop(snapshot.token, None)
        if found is not None:
            found.close()

    def seal(self, snapshot: Snapshot, *, digests: Mapping[str, int] | None = None) -> WeightsPublished:
        """Attest a staged snapshot and serve it; a snapshot of the same version is replaced.

        `digests` are of each whole tensor, where this rank holds only slices: the sum of all ranks'
        `Snapshot.digests()` (`digest.add_digests`). Computed from the snapshot if absent.
        """
        snapshot.copying.wait()
        per_tensor = dict(snapshot.digests() if digests is None else digests)
        manifest = wire.Manifest(
            version=snapshot.version,
            token=snapshot.token,
            digest=digest.combine(per_tensor),
            digests=per_tensor,
            path=str(snapshot.file.path),
            file_bytes=snapshot.file.size,
            entries=snapshot.entries,
        )
        if self._writer is not None:
            # Once it is served, `retain` may drop its file at any time.
            self._writer.put(manifest)
        with self._lock:
            self._staged.pop(snapshot.token, None)
        replaced = self._server.add(Published(snapshot=snapshot, manifest=manifest))
        if replaced is not None:
            replaced.snapshot.close()
        return WeightsPublished(version=snapshot.version, digest=manifest.digest, nbytes=snapshot.nbytes)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> WeightsPublished:
        """Stage and seal in one go."""
        return self.seal(self.stage(version, tensors, dtype))

    def retain(self, oldest: int) -> None:
        """Drop versions before `oldest`; receivers that mapped one keep it until they are done.

        The file of one of them is kept for the next version, which takes it if nobody reads or sends it any more.
        """
        for published in self._server.remove(lambda version: version < oldest):
            with self._lock:
                if self._spare is None:
                    self._spare = published.snapshot.file
                else:
                    published.snapshot.file.close()
        if self._writer is not None:
            self._writer.remove_before(oldest)

    def drop_after(self, newest: int) -> None:
        """Drop versions after `newest`, which come again with other weights; what is stored is replaced then."""
        for published in self._server.remove(lambda version: version > newest):
            published.snapshot.file.close()

    def close(self) -> None:
        """Stop serving and drop every version. Idempotent; happens at the end of the process at the latest."""
        self._server.close()
        if self._writer is not None:
            self._writer.close()
        for published in self._server.remove(lambda _: True):
            published.snapshot.file.close()
        with self._lock:
            for snapshot in self._staged.values():
                snapshot.close()
            self._staged.clear()
            if self._spare is not None:
                self._spare.close()
                self._spare = None
