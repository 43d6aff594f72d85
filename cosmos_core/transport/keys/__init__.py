"""Who may speak in a run: keys, their files, the folder that holds them, and the allow-list."""

from cosmos_core.transport.keys.files import (
    check_private,
    controller_key,
    keys_in,
    person_key,
    read_key,
    replica_key,
    write_key,
)
from cosmos_core.transport.keys.key import (
    ALLOWED,
    CONTROLLER,
    ROLES,
    Key,
    KeyPair,
    PeerRole,
    check_label,
    check_names,
    is_named,
    is_public,
)

__all__ = [
    "ALLOWED",
    "CONTROLLER",
    "ROLES",
    "Key",
    "KeyPair",
    "PeerRole",
    "check_label",
    "check_names",
    "check_private",
    "controller_key",
    "is_named",
    "is_public",
    "keys_in",
    "person_key",
    "read_key",
    "replica_key",
    "write_key",
]
