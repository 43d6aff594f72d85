"""What people and runs do with a folder of keys: make it, add to it, allow and revoke."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.nearest import suggestion
from cosmos_core.errors import ConfigError
from cosmos_core.transport.keys.allowed import Peer, changing, read_peers
from cosmos_core.transport.keys.files import controller_key, read_key, write_key
from cosmos_core.transport.keys.key import (
    ALLOWED,
    CONTROLLER,
    ROLES,
    Key,
    KeyPair,
    PeerRole,
    check_label,
    check_names,
    is_public,
)


@attrs.frozen(kw_only=True)
class Wanted:
    """A key to be made.

    Attributes:
        role: What its holder will be.
        name: Replicas: a name, or the beginning of names with `*` after it. Others: what they are called.
    """

    role: PeerRole
    name: str

    @property
    def label(self) -> str:
        """What its file is called: `rollout` for `rollout-*`."""
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
    """Make keys and allow them; the controller's, too, if it has none yet.

    Args:
        folder: Of the keys; made (mode 0700) if it is not there.
        wanted: Which.

    Returns:
        The files that were made.

    Raises:
        ConfigError: A name cannot be, or a key of that name is there already (then none is made), or the folder cannot
            be written.
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

    Raises:
        ConfigError: They cannot be made.
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
    """Refuse a folder that is no door: the controller's key and a list of those who may speak.

    Raises:
        ConfigError: Something is missing, damaged, or open to other users.
    """
    controller_key(folder)
    if not read_peers(folder / ALLOWED):
        raise ConfigError(f"{folder / ALLOWED}: nobody is allowed to speak; make keys with `cosmos keys new {folder}`")


def allow(folder: Path, label: str, *, public: str, role: PeerRole, names: Sequence[str] = ()) -> None:
    """Allow a public key, such as one that was made elsewhere or was revoked.

    Raises:
        ConfigError: It is no key, its label is taken by another one, or a name cannot be.
    """
    check_label(label)
    check_names(names)
    if not is_public(public):
        raise ConfigError(
            f"{public!r} is no public key; one has 40 characters of Z85, as in the line `public` of a key"
        )
    if role in {"policy", "rollout"} and not names:
        raise ConfigError(f"{label}: a {role} key needs the names that its holder may have, such as --as '{role}-*'")
    with changing(folder) as peers:
        present = peers.get(label)
        if present is not None and present.public != public:
            raise ConfigError(f"{folder / ALLOWED}: {label} is another key; revoke that first, or choose another name")
        peers[label] = Peer(label=label, role=role, names=tuple(names), public=public)


def allow_again(folder: Path, label: str) -> None:
    """Allow the key of a file in the folder, such as one that was revoked.

    Raises:
        ConfigError: There is no such file, or it is the controller's.
    """
    check_label(label)
    key = read_key(folder / f"{label}.key")
    if key.role == "controller":
        raise ConfigError(f"{folder / label}.key: the controller's own key; it needs no leave")
    allow(folder, label, public=key.pair.public, role=key.role, names=key.names)


def role_of(text: str) -> PeerRole:
    """A role from a word.

    Raises:
        ConfigError: It is none.
    """
    for role in ROLES:
        if role == text:
            return role
    raise ConfigError(f"{text!r} is no role; {suggestion(text, ROLES)}")


def revoke(folder: Path, label: str) -> None:
    """Take a key out of the allow-list; its file stays.

    Raises:
        ConfigError: The list has no such key.
    """
    with changing(folder) as peers:
        if label not in peers:
            known = ", ".join(sorted(peers)) or "nobody"
            raise ConfigError(f"{folder / ALLOWED}: {label} is not in it (there are: {known})")
        del peers[label]
