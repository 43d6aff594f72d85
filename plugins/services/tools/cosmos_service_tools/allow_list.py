"""Changes who may speak in a run: allows keys, and revokes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cosmos_core.config.problems import suggestion
from cosmos_core.errors import ConfigError
from cosmos_core.transport.key_folder import Peer, changing
from cosmos_core.transport.keys import ALLOWED, ROLES, PeerRole, check_label, check_names, is_public, read_key


def allow(folder: Path, label: str, *, public: str, role: PeerRole, names: Sequence[str] = ()) -> None:
    """Allow a public key, such as one that was made elsewhere or was revoked."""
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
    """Allow the key of a file in the folder, such as one that was revoked."""
    check_label(label)
    key = read_key(folder / f"{label}.key")
    if key.role == "controller":
        raise ConfigError(f"{folder / label}.key: the controller's own key; it needs no leave")
    allow(folder, label, public=key.pair.public, role=key.role, names=key.names)


def role_of(text: str) -> PeerRole:
    """A role from a word."""
    for role in ROLES:
        if role == text:
            return role
    raise ConfigError(f"{text!r} is no role; {suggestion(text, ROLES)}")


def revoke(folder: Path, label: str) -> None:
    """Take a key out of the allow-list; its file stays."""
    with changing(folder) as peers:
        if label not in peers:
            known = ", ".join(sorted(peers)) or "nobody"
            raise ConfigError(f"{folder / ALLOWED}: {label} is not in it (there are: {known})")
        del peers[label]
