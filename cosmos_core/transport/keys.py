"""Keys: a CURVE key pair, who its holder is, as whom it may speak, and the files that keys lie in.

A folder of keys holds `controller.key`, one `LABEL.key` for each pool, replica or person, and the allow-list
`allowed.toml` (see `transport.key_folder`). A process needs its own file alone; whoever serves others needs the list
too. Secret keys are read from files only: never from a command line, an environment variable or a message, and never
shown. A file that is missing, damaged, or open to other users is a `ConfigError`, as is a name that nobody can have.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import attrs
import zmq
from zmq.utils import z85

from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, TransportError

PeerRole: TypeAlias = Literal["policy", "rollout", "person", "observer"]
"""A replica of a pool, who may ask the run for something, or who may only watch it."""

ROLES: Final[tuple[PeerRole, ...]] = get_args(PeerRole)
CONTROLLER: Final = "controller"
ALLOWED: Final = "allowed.toml"

_PATTERN: Final = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127}\*?")
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEY_CHARACTERS: Final = 40
_SUFFIX: Final = ".key"
_FIELDS: Final = {"role", "names", "server", "public", "secret"}
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_HEADER: Final = """\
# A secret key of cosmos-core. Whoever has this file can speak as it says: keep its mode at 0600, and send it over
# nothing that others can read. `cosmos keys revoke` makes it worthless.
"""


@attrs.frozen(kw_only=True)
class KeyPair:
    """A CURVE key pair, each key in Z85 (40 characters)."""

    public: str
    secret: str = attrs.field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """Make one."""
        if not zmq.has("curve"):
            raise TransportError("this libzmq has no CURVE; install pyzmq from its wheel, or libzmq with libsodium")
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode("ascii"), secret=secret.decode("ascii"))


@attrs.frozen(kw_only=True)
class Key:
    """A key file's content; `label` is the file's name without its suffix, `names` as of `key_folder.Peer`."""

    label: str
    role: PeerRole | Literal["controller"]
    names: tuple[str, ...] = ()
    server: str
    pair: KeyPair


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """True if a replica's name is one of some, each of which may end in `*`."""
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in patterns)


def check_names(names: Sequence[str]) -> None:
    """Refuse what no replica can be called."""
    for name in names:
        if not _PATTERN.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name of replicas: letters, digits, '.', '_' and '-', and perhaps a '*' at the end"
            )


def check_label(label: str) -> None:
    """Refuse what no key file can be called."""
    if not _LABEL.fullmatch(label):
        raise ConfigError(f"{label!r} is no name of a key: letters, digits, '.', '_' and '-', at most 128")


def is_public(text: str) -> bool:
    """True if a text is a key in Z85."""
    try:
        return len(text) == _KEY_CHARACTERS and len(z85.decode(text.encode("ascii"))) == _KEY_CHARACTERS * 4 // 5
    except (ValueError, KeyError, UnicodeEncodeError, OverflowError):
        return False


def write_key(folder: Path, key: Key) -> Path:
    """Write a key file (mode 0600) into a folder (made with mode 0700 if it is not there); its path."""
    path = folder / f"{key.label}{_SUFFIX}"
    lines = [
        f"role = {json.dumps(key.role)}",
        f"names = {json.dumps(key.names)}",
        f"server = {json.dumps(key.server)}",
        f"public = {json.dumps(key.pair.public)}",
        f"secret = {json.dumps(key.pair.secret)}",
    ]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(_HEADER + "\n".join(lines) + "\n")
    except FileExistsError:
        raise ConfigError(f"{path}: there is such a key already; choose another name, or remove the file") from None
    except OSError as error:
        raise ConfigError(f"{path}: the key cannot be written: {error.strerror}") from error
    return path


def read_key(path: Path) -> Key:
    """Read a key file."""
    check_private(path)
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such key; make it with `cosmos keys new {path.parent}`") from None
    except OSError as error:
        raise ConfigError(f"{path}: the key cannot be read: {error.strerror}") from error
    except ValueError:
        # The decoder's own words would show what it read, and that is secret.
        raise ConfigError(f"{path}: damaged: not a key file; make another with `cosmos keys new`") from None
    texts = [found.get(field) for field in ("server", "public", "secret")]
    if found.keys() - _FIELDS or not all(isinstance(text, str) and is_public(text) for text in texts):
        raise ConfigError(f"{path}: damaged: not a key file; make another with `cosmos keys new`")
    pair = {field: found.pop(field) for field in ("public", "secret")}
    key = structure({**found, "label": path.name.removesuffix(_SUFFIX), "pair": pair}, Key, str(path))
    check_names(key.names)
    return key


def check_private(path: Path) -> None:
    """Refuse a secret that other users could have read or changed; a file that is not there passes."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if os.name == "posix" and mode & _OTHERS:
        raise ConfigError(
            f"{path}: other users may open this key (mode {stat.S_IMODE(mode):04o}); "
            f"if nobody has: chmod 600 {path}, else make a new one and revoke this"
        )


def keys_in(folder: Path) -> Iterator[Key]:
    """The keys of a folder that this user may read, by label."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        if os.access(path, os.R_OK):
            yield read_key(path)


def controller_key(folder: Path) -> Key:
    """The controller's own key."""
    return read_key(folder / f"{CONTROLLER}{_SUFFIX}")


def replica_key(folder: Path, role: Literal["policy", "rollout"], name: str) -> Key:
    """The key with which a replica speaks as `name`: one for that name, else one for several."""
    # One that is for this name alone comes first.
    candidates = sorted(keys_in(folder), key=lambda key: (key.label != name, name not in key.names))
    for key in candidates:
        if key.role == role and is_named(name, key.names):
            return key
    seen = ", ".join(f"{key.label} ({key.role}: {', '.join(key.names) or 'no names'})" for key in candidates)
    raise ConfigError(
        f"{folder}: no key with which a {role} replica may be called {name!r} (there are: {seen or 'none'}); "
        f"make one with `cosmos keys new {folder} --{role} {name}`"
    )


def person_key(folder: Path, *, may_ask: bool = False) -> Key:
    """The key with which this user looks at a run; with `may_ask`, an observer's key will not do."""
    found = [key for key in keys_in(folder) if key.role in {"person", "observer"}]
    found.sort(key=lambda key: key.role != "person")
    if not found:
        raise ConfigError(
            f"{folder}: no key of a person that you may read; whoever started the run makes one with "
            f"`cosmos keys new {folder} --person NAME`"
        )
    if may_ask and found[0].role != "person":
        raise ConfigError(
            f"{folder}: {found[0].label} is an observer's key, which may watch the run and ask it for nothing; "
            f"whoever started the run makes another with `cosmos keys new {folder} --person NAME`"
        )
    return found[0]
