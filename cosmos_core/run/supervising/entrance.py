"""Whether a replica would be let in: a key that was taken from the allow-list is refused however often it knocks."""

from __future__ import annotations

from cosmos_core.config.job import Job
from cosmos_core.errors import ConfigError
from cosmos_core.transport.keys import ALLOWED, replica_key
from cosmos_core.transport.keys.allowed import read_peers
from cosmos_core.transport.messages import Role


def barred(job: Job, role: Role, name: str) -> str:
    """Why the controller would refuse the key of a replica; empty if it would not.

    Args:
        job: The run.
        role: What the replica does.
        name: What it is called.
    """
    try:
        key = replica_key(job.keys, role, name)
        peers = read_peers(job.keys / ALLOWED)
    except ConfigError as error:
        return str(error)
    if any(peer.public == key.pair.public for peer in peers.values()):
        return ""
    return f"its key {key.label} was revoked (cosmos keys allow lets it in again)"
