"""A folder of keys: making it, adding to it, and the allow-list in it, which says who may speak.

The list is read again whenever its file has changed. What cannot be read, written, or be called so is a `ConfigError`
that names the file and says what to do; nothing is changed then.
"""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError
from cosmos_core.files import replace_file
from cosmos_core.transport.keys import (
    ALLOWED,
    CONTROLLER,
    Key,
    KeyPair,
    PeerRole,
    check_label,
    check_names,
    controller_key,
    is_public,
    write_key,
)

_LOG: Final = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
"""Seconds between looks at the file."""
_HEADER: Final = """\
# Who may speak in a run, by public key. It is read again while runs go on: whoever is taken out is refused from then
# on. Change it with `cosmos keys allow` and `cosmos keys revoke`; copy it to every host that has keys of its own.
"""


@attrs.frozen(kw_only=True)
class Peer:
    """The holder of a key, and the names of replicas as which it may speak; one may end in `*`."""

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
    """The peers of an allow-list, by label."""
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
    """Replace an allow-list at once, so that readers see the old or the new one."""
    text = _HEADER
    for label, peer in sorted(peers.items()):
        text += f"\n[{json.dumps(label)}]\npublic = {json.dumps(peer.public)}\nrole = {json.dumps(peer.role)}\n"
        text += f"names = {json.dumps(peer.names)}\n"
    try:
        replace_file(path, text.encode("ascii"), mode=0o600)
    except OSError as error:
        raise ConfigError(f"{path}: the allow-list cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[dict[str, Peer]]:
    """The peers of a folder's allow-list, to be changed; written when the block ends without an error."""
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
        """Read it."""
        self.path: Final = path
        self._lock: Final = threading.Lock()
        self._seen: tuple[int, int, int] | None = self._stamp()
        self._peers = _by_public(read_peers(path))
        self._look_at = time.monotonic() + _LOOK_S
        self._num_changes = 0

    @property
    def num_changes(self) -> int:
        """The number of its changes."""
        self._follow()
        return self._num_changes

    def find(self, public: str) -> Peer | None:
        """The holder of a key; None if nobody who may speak does."""
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


@attrs.frozen(kw_only=True)
class Wanted:
    """A key to be made. The name of replicas is one, or the beginning of names with `*` after it."""

    role: PeerRole
    name: str

    @property
    def label(self) -> str:
        """The name of its file: `rollout` for `rollout-*`."""
        return self.name.rstrip("*").rstrip("-._") or self.role

    @property
    def names(self) -> tuple[str, ...]:
        """Names as which its holder may speak."""
        return (self.name,) if self.role in {"policy", "rollout"} else ()


USUAL: Final = (
    Wanted(role="policy", name="policy-*"),
    Wanted(role="rollout", name="rollout-*"),
    Wanted(role="person", name="operator"),
)
"""Keys of a run on one machine: one for each pool, and one for who started it."""


def make(folder: Path, wanted: Sequence[Wanted]) -> list[Path]:
    """Make keys and allow them; the controller's, too, if it has none yet. The files that were made.

    The folder is made (mode 0700) if it is not there.
    """
    for each in wanted:
        check_label(each.label)
        check_names(each.names)
    labels = [each.label for each in wanted]
    for label in labels:
        path = folder / f"{label}.key"
        if label == CONTROLLER or labels.count(label) > 1:
            raise ConfigError(f"{path}: there would be two such keys; choose another name")
        if path.exists():
            raise ConfigError(
                f"{path} exists, and is not replaced: it can be used as it is (`cosmos keys list {folder}` shows who "
                "may speak); for more keys choose other names, with --policy, --rollout, --person or --observer"
            )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: the folder of keys cannot be made: {error.strerror}") from error
    made = []
    with changing(folder) as peers:
        if taken := peers.keys() & set(labels):
            raise ConfigError(f"{folder / ALLOWED}: it lists {', '.join(sorted(taken))} already; choose another name")
        if not (folder / f"{CONTROLLER}.key").exists():
            pair = KeyPair.new()
            own = Key(label=CONTROLLER, role="controller", names=(), server=pair.public, pair=pair)
            made.append(write_key(folder, own))
        server = controller_key(folder).server
        for each in wanted:
            pair = KeyPair.new()
            key = Key(label=each.label, role=each.role, names=each.names, server=server, pair=pair)
            made.append(write_key(folder, key))
            peers[key.label] = Peer(label=key.label, role=each.role, names=each.names, public=pair.public)
    return made


def ensure(folder: Path) -> None:
    """Make the usual keys where there are none: what a run does in its own folder.

    They are made aside and put in place at once, so that nobody finds half of them.
    """
    if (folder / f"{CONTROLLER}.key").exists():
        return
    if folder.exists():
        raise ConfigError(f"{folder}: a folder of keys without {CONTROLLER}.key; remove it, and it is made anew")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    make(draft, USUAL)
    try:
        draft.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: the keys cannot be put there: {error.strerror}") from error


def check_folder(folder: Path) -> None:
    """Refuse a folder that lets nobody in: it needs the controller's key and a list of those who may speak."""
    controller_key(folder)
    if not read_peers(folder / ALLOWED):
        raise ConfigError(f"{folder / ALLOWED}: nobody is allowed to speak; make keys with `cosmos keys new {folder}`")
