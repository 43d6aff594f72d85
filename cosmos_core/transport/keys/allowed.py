"""The allow-list: which public keys may speak, and as whom. It is read again whenever its file has changed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError
from cosmos_core.transport.keys.key import ALLOWED, PeerRole, check_label, check_names, is_public

_LOG: Final = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
"""Seconds between looks at the file."""
_HEADER: Final = """\
# Who may speak in a run, by public key. It is read again while runs go on: whoever is taken out is refused from then
# on. Change it with `cosmos keys allow` and `cosmos keys revoke`; copy it to every host that has keys of its own.
"""


@attrs.frozen(kw_only=True)
class Peer:
    """Who holds a key.

    Attributes:
        label: What the key is called.
        role: What its holder is.
        names: Names of replicas as which it may speak; one may end in `*`.
        public: The key.
    """

    label: str
    role: PeerRole
    names: tuple[str, ...] = ()
    public: str


@attrs.frozen(kw_only=True)
class _Stored:
    public: str
    role: PeerRole
    names: tuple[str, ...] = ()


def read_peers(path: Path) -> dict[str, Peer]:
    """The peers of an allow-list, by label.

    Raises:
        ConfigError: It is not there, damaged, or other users may change it.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            found = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such allow-list; `cosmos keys new {path.parent}` makes one") from None
    except OSError as error:
        raise ConfigError(f"{path}: the allow-list cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: the allow-list is damaged: {error}") from error
    if os.name == "posix" and mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{path}: other users may change this allow-list (mode {stat.S_IMODE(mode):04o}); look at what it says, "
            f"then: chmod 600 {path}"
        )
    peers = {}
    for label, stored in structure(found, dict[str, _Stored], str(path)).items():
        try:
            check_label(label)
            check_names(stored.names)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if not is_public(stored.public):
            raise ConfigError(f"{path}: {label}.public: {stored.public!r} is no public key (40 characters of Z85)")
        peers[label] = Peer(label=label, role=stored.role, names=stored.names, public=stored.public)
    return peers


def write_peers(path: Path, peers: Mapping[str, Peer]) -> None:
    """Replace an allow-list at once, so that readers see the old or the new one.

    Raises:
        ConfigError: It cannot be written.
    """
    text = _HEADER
    for label, peer in sorted(peers.items()):
        text += f"\n[{json.dumps(label)}]\npublic = {json.dumps(peer.public)}\nrole = {json.dumps(peer.role)}\n"
        text += f"names = {json.dumps(peer.names)}\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: the allow-list cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[dict[str, Peer]]:
    """The peers of a folder's allow-list, to be changed; written when the block ends without an error.

    Raises:
        ConfigError: It cannot be read or written.
    """
    path = folder / ALLOWED
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{folder}: not a folder of keys: {error.strerror}; see `cosmos keys new --help`") from error
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        peers = read_peers(path) if path.exists() else {}
        yield peers
        write_peers(path, peers)
    finally:
        os.close(handle)


class AllowList:
    """An allow-list that follows its file. Safe to use from any thread.

    A file that cannot be read changes nothing: the list stays as it was, and the log says so.
    """

    def __init__(self, path: Path) -> None:
        """Read it.

        Raises:
            ConfigError: See `read_peers`.
        """
        self.path: Final = path
        self._lock: Final = threading.Lock()
        self._seen: tuple[int, int, int] | None = self._stamp()
        self._peers = _by_public(read_peers(path))
        self._look_at = time.monotonic() + _LOOK_S
        self._num_changes = 0

    @property
    def num_changes(self) -> int:
        """How often it has changed."""
        self._follow()
        return self._num_changes

    def find(self, public: str) -> Peer | None:
        """Who holds a key; None if nobody who may speak does."""
        self._follow()
        return self._peers.get(public)

    def _follow(self) -> None:
        if time.monotonic() < self._look_at:
            return
        with self._lock:
            self._look_at = time.monotonic() + _LOOK_S
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._seen = stamp
            try:
                self._peers = _by_public(read_peers(self.path))
            except ConfigError as error:
                _LOG.error("%s; who may speak stays as it was", error)
                return
            self._num_changes += 1
            _LOG.info("%s has changed: %d keys are allowed", self.path, len(self._peers))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _by_public(peers: Mapping[str, Peer]) -> dict[str, Peer]:
    return {peer.public: peer for peer in peers.values()}
