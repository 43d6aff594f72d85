"""The line to each replica: what it was told last, what it has seen, when it was heard."""

from __future__ import annotations

from typing import Final

import attrs

from cosmos_core.controller.machine.directives import directive_for
from cosmos_core.controller.machine.offers import Offers
from cosmos_core.controller.machine.state import State
from cosmos_core.transport.directives import PolicyDirective, RolloutDirective
from cosmos_core.transport.messages import Acknowledged, Beat, Directive, Down

RESEND_S: Final = 1.0


@attrs.define(kw_only=True)
class Line:
    """A replica's connection. A directive is numbered when it differs from the last one.

    Attributes:
        incarnation: The replica's process.
        identity: Its address at the socket; empty until it was heard under this controller.
        heard_at: When it was last heard.
        seen: Newest directive that it has confirmed.
        gauges: Its newest gauges.
        acknowledged: Number of the newest report that it was told is durable.
    """

    incarnation: str
    identity: bytes = b""
    heard_at: float
    seen: int = 0
    gauges: dict[str, float] = attrs.field(factory=dict)
    acknowledged: int = -1
    _content: PolicyDirective | RolloutDirective | None = None
    _revision: int = 0
    _sent_at: float = 0.0

    def hear(self, identity: bytes, now: float) -> None:
        """Note a message of the replica."""
        self.identity = identity
        self.heard_at = now

    def beat(self, beat: Beat) -> None:
        """Take in a heartbeat."""
        self.seen = beat.revision
        self.gauges = beat.gauges

    def revise(self, content: PolicyDirective | RolloutDirective) -> bool:
        """Give the desired state; whether it differs from the last one, so that it must be sent."""
        if content == self._content:
            return False
        self._content = content
        self._revision += 1
        return True

    def is_overdue(self, now: float) -> bool:
        """Whether the newest directive should be repeated."""
        return self._content is not None and self.seen < self._revision and now - self._sent_at >= RESEND_S

    def directive(self, *, term: int, acknowledged: int, now: float) -> Directive:
        """The newest directive as a message that is being sent now."""
        self._sent_at = now
        self.acknowledged = acknowledged
        content = self._content
        return Directive(
            term=term,
            revision=self._revision,
            acknowledged=acknowledged,
            rollout=content if isinstance(content, RolloutDirective) else None,
            policy=content if isinstance(content, PolicyDirective) else None,
        )


class Lines:
    """The lines to all replicas of the run."""

    def __init__(self, state: State, now: float) -> None:
        """Open a line for each replica of the state; those of an earlier controller have yet to be heard."""
        self._state: Final = state
        self._lines: Final[dict[str, Line]] = {}
        for replica in state.replicas.values():
            self._lines[replica.name] = Line(incarnation=replica.incarnation, heard_at=now)
        state.touch()

    def find(self, name: str, incarnation: str) -> Line | None:
        """The line of a replica's process; None if it is not in the run."""
        replica = self._state.replicas.get(name)
        if replica is None or replica.incarnation != incarnation:
            return None
        line = self._lines.get(name)
        return line if line is not None and line.incarnation == incarnation else None

    def open(self, name: str, incarnation: str, now: float) -> Line:
        """A fresh line for a replica that has just joined."""
        line = self._lines[name] = Line(incarnation=incarnation, heard_at=now)
        self._state.touched.add(name)
        return line

    def items(self) -> list[tuple[str, Line]]:
        """Names and lines of the replicas that are in the run."""
        return [(name, self._lines[name]) for name in self._state.replicas]

    def due(self, now: float) -> list[tuple[bytes, Down]]:
        """What has to be said to replicas: changed or overdue directives, and acknowledgements."""
        state, messages = self._state, list[tuple[bytes, Down]]()
        changed, state.touched = state.touched, set()
        offers = Offers(state)
        for name, replica in state.replicas.items():
            line = self._lines[name]
            is_news = name in changed and line.revise(directive_for(state, name, offers))
            if not line.identity:
                continue
            if is_news or line.is_overdue(now):
                directive = line.directive(term=state.term, acknowledged=replica.received, now=now)
                messages.append((line.identity, directive))
            elif 0 <= line.acknowledged < replica.received:
                line.acknowledged = replica.received
                messages.append((line.identity, Acknowledged(term=state.term, acknowledged=replica.received)))
        return messages

    def silent(self, now: float, lost_after_s: float) -> list[tuple[str, str]]:
        """Names and incarnations of replicas that were not heard for too long."""
        return [(name, line.incarnation) for name, line in self.items() if now - line.heard_at > lost_after_s]

    def excuse(self, seconds: float) -> None:
        """Forgive a silence during which nobody listened."""
        for line in self._lines.values():
            line.heard_at += seconds
