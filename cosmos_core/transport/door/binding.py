"""What the holder of a key may say to the controller: as whom, and which messages."""

from __future__ import annotations

from cosmos_core.transport.keys.allowed import Peer
from cosmos_core.transport.keys.key import is_named
from cosmos_core.transport.messages import Beat, Command, Hello, Reports, Up


def refusal(peer: Peer, message: Up) -> str:
    """Why this peer may not say this; empty if it may."""
    is_replica = peer.role in {"policy", "rollout"}
    if isinstance(message, Hello | Beat | Reports):
        if is_replica:
            return _as_replica(peer, message)
        return f"key {peer.label} is of role {peer.role}, which cannot speak as a replica"
    if isinstance(message, Command) and peer.role != "person":
        return f"key {peer.label} is of role {peer.role}, which may ask the run for nothing; a person's key may"
    return f"key {peer.label} is of role {peer.role}, which may not watch the run" if is_replica else ""


def _as_replica(peer: Peer, message: Hello | Beat | Reports) -> str:
    if not is_named(message.name, peer.names):
        return f"key {peer.label} may speak as {', '.join(peer.names) or 'nobody'}, not as {message.name!r}"
    if isinstance(message, Hello) and message.role != peer.role:
        return f"key {peer.label} is for {peer.role} replicas, and {message.name!r} says it is a {message.role} one"
    return ""
