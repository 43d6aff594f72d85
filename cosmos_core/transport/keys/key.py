"""A key, who its holder is, and as whom it may speak."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias, get_args

import attrs
import zmq
from zmq.utils import z85

from cosmos_core.errors import ConfigError, TransportError

PeerRole: TypeAlias = Literal["policy", "rollout", "person", "observer"]
"""A replica of a pool, who may ask the run for something, or who may only watch it."""

ROLES: Final[tuple[PeerRole, ...]] = get_args(PeerRole)
CONTROLLER: Final = "controller"
ALLOWED: Final = "allowed.toml"

_PATTERN: Final = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127}\*?")
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEY_CHARACTERS: Final = 40


@attrs.frozen(kw_only=True)
class KeyPair:
    """A CURVE key pair, each key in Z85 (40 characters)."""

    public: str
    secret: str = attrs.field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """Make one.

        Raises:
            TransportError: This libzmq was built without CURVE.
        """
        if not zmq.has("curve"):
            raise TransportError("this libzmq has no CURVE; install pyzmq from its wheel, or libzmq with libsodium")
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode("ascii"), secret=secret.decode("ascii"))


@attrs.frozen(kw_only=True)
class Key:
    """A key file's content.

    Attributes:
        label: The file's name without its suffix.
        role: What its holder is; `controller` for the controller itself.
        names: Names of replicas as which it may speak; one may end in `*`. Empty for people and the controller.
        server: Public key of the controller.
        pair: The keys.
    """

    label: str
    role: PeerRole | Literal["controller"]
    names: tuple[str, ...]
    server: str
    pair: KeyPair


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether a replica's name is one of some, each of which may end in `*`."""
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in patterns)


def check_names(names: Sequence[str]) -> None:
    """Refuse what no replica can be called.

    Raises:
        ConfigError: One of them is no name, nor the beginning of one with `*` after it.
    """
    for name in names:
        if not _PATTERN.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name of replicas: letters, digits, '.', '_' and '-', and perhaps a '*' at the end"
            )


def check_label(label: str) -> None:
    """Refuse what no key file can be called.

    Raises:
        ConfigError: It is no such name.
    """
    if not _LABEL.fullmatch(label):
        raise ConfigError(f"{label!r} is no name of a key: letters, digits, '.', '_' and '-', at most 128")


def is_public(text: str) -> bool:
    """Whether a text is a key in Z85."""
    try:
        return len(text) == _KEY_CHARACTERS and len(z85.decode(text.encode("ascii"))) == _KEY_CHARACTERS * 4 // 5
    except (ValueError, KeyError, UnicodeEncodeError, OverflowError):
        return False
