"""The controller's reception: who sent a message, whether it can be read, and whether they may say that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

import attrs

from cosmos_core.errors import TransportError
from cosmos_core.transport.door import Guarded
from cosmos_core.transport.door.binding import refusal
from cosmos_core.transport.messages import Answer, Command, Refused, Up
from cosmos_core.transport.sockets import receive_marked
from cosmos_core.transport.wire import UP

_LOG: Final = logging.getLogger(__name__)

_SPARE_IDENTITIES: Final = 1000


@attrs.frozen(kw_only=True)
class Turned:
    """A message that was not taken, and what to answer.

    Attributes:
        identity: Who sent it, at the socket.
        answer: What to say; None: nothing.
    """

    identity: bytes
    answer: Refused | Answer | None


class Reception:
    """Takes messages in at a socket. Used by the server's thread.

    Args:
        guarded: The socket; without a door, anyone may say anything.

    Attributes:
        num_malformed: Messages that could not be read.
        num_refused: Messages of those who may not say them.
    """

    def __init__(self, guarded: Guarded) -> None:
        self._guarded: Final = guarded
        self._keys: Final[dict[bytes, str]] = {}
        self._num_changes = 0
        self._most_keys = _SPARE_IDENTITIES
        self.num_malformed = 0
        self.num_refused = 0

    def take(self) -> tuple[bytes, Up] | Turned:
        """The next message, with the identity that it came from.

        Raises:
            zmq.Again: There is none.
        """
        identity = b""
        try:
            first, body = receive_marked(self._guarded.socket, parts=2)
            identity = first.bytes
            door = self._guarded.door
            if door is None:
                return identity, UP.decode(b"".join(body))
            peer = self._guarded.who(first)
            if peer is None:
                return self._refuse(identity, "its key may not speak here (any more)", None)
            message = UP.decode(b"".join(body))
        except TransportError as error:
            self.num_malformed += 1
            if self.num_malformed.bit_count() == 1:  # ever less often: a broken peer must not fill the log
                _LOG.warning("ignored a message (%d so far): %s", self.num_malformed, error)
            return Turned(identity=identity, answer=None)
        if reason := refusal(peer, message):
            return self._refuse(identity, reason, message)
        self._keys[identity] = peer.public
        return identity, message

    def revoked(self, known: Callable[[], Collection[bytes]]) -> list[bytes]:
        """Identities that speak with a key that may not any more; empty unless the allow-list has changed.

        Args:
            known: Identities of replicas and observers; others are forgotten. Asked seldom, as there may be thousands.
        """
        door = self._guarded.door
        if door is None:
            return []
        if len(self._keys) > self._most_keys:
            kept = set(known())
            for identity in self._keys.keys() - kept:
                del self._keys[identity]
            self._most_keys = 2 * len(kept) + _SPARE_IDENTITIES
        if door.allowed.num_changes == self._num_changes:
            return []
        self._num_changes = door.allowed.num_changes
        return [identity for identity, public in self._keys.items() if door.find(public) is None]

    def gauges(self) -> dict[str, float]:
        """What was not taken, for observers."""
        return {
            "messages_malformed": self.num_malformed,
            "messages_refused": self.num_refused,
            "connections_refused": self._guarded.num_refused,
        }

    def _refuse(self, identity: bytes, reason: str, message: Up | None) -> Turned:
        self.num_refused += 1
        if self.num_refused.bit_count() == 1:
            _LOG.warning("refused a message (%d so far): %s", self.num_refused, reason)
        if isinstance(message, Command):
            return Turned(identity=identity, answer=Answer(ident=message.ident, refusal=reason))
        return Turned(identity=identity, answer=Refused(reason=reason, is_final=True))
