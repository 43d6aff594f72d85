"""The line to each replica: what it was told last, what it has seen, when it was heard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import attrs

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.machine.directives import Offers, directive_for
from cosmos_core.control.machine.state import State
from cosmos_core.transport.directives import PolicyDirective, RolloutDirective
from cosmos_core.transport.messages import Acknowledged, Beat, Directive, Down

RESEND_S: Final = 1.0
_SCAN_S: Final = 0.2
"""Between two looks at everybody, for directives that are overdue: with thousands of replicas a look takes a while."""
PROBE_S: Final = 0.5
"""Between two looks at the connection of a replica that is quiet."""
_QUIET_BEATS: Final = 2
"""Heartbeats that were missed before its connection is looked at."""


@attrs.define(kw_only=True)
class Line:
    """A replica's connection. A directive is numbered when it differs from the last one.

    Attributes:
        identity: Its address at the socket; empty until it was heard under this controller.
        moved_at: When it last made progress, or had nothing to do.
        doing: What it works on; empty if it has nothing to do.
        waits: Whether it does no more than wait for other replicas.
        seen: Newest directive that it has confirmed.
        acknowledged: Number of the newest report that it was told is durable.
        probed_at: When it was last asked whether its connection is there.
    """

    incarnation: str
    identity: bytes = b""
    heard_at: float
    moved_at: float = attrs.field(default=attrs.Factory(lambda self: self.heard_at, takes_self=True))
    doing: str = ""
    waits: bool = False
    seen: int = 0
    gauges: dict[str, float] = attrs.field(factory=dict)
    acknowledged: int = -1
    probed_at: float = 0.0
    _progress: int = 0
    _content: PolicyDirective | RolloutDirective | None = None
    _revision: int = 0
    _sent_at: float = 0.0

    def beat(self, beat: Beat, now: float) -> None:
        """Take in a heartbeat."""
        self.seen = beat.revision
        self.gauges = beat.gauges
        has_moved = (beat.progress, beat.doing) != (self._progress, self.doing)
        self._progress, self.doing, self.waits = beat.progress, beat.doing, beat.waits
        if has_moved or not beat.doing:
            self.moved_at = now

    def revise(self, content: PolicyDirective | RolloutDirective) -> bool:
        """Give the desired state; whether it differs from the last one, so that it must be sent."""
        if content == self._content:
            return False
        self._content = content
        self._revision += 1
        return True

    def is_overdue(self, now: float) -> bool:
        """True if the newest directive should be repeated."""
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


IsThere: TypeAlias = Callable[[str, Line], bool]
"""Whether a replica, by its name and line, is connected."""


class Lines:
    """The lines to all replicas of the run."""

    def __init__(self, state: State, now: float) -> None:
        """Open a line for each replica of the state; those of an earlier controller have yet to be heard."""
        self._state: Final = state
        self._lines: Final[dict[str, Line]] = {}
        self._heard: set[str] = set()
        self._scanned_at = now
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
        """The messages that are due to replicas: changed or overdue directives, and acknowledgements."""
        state, messages = self._state, list[tuple[bytes, Down]]()
        changed, state.touched = state.touched, set()
        offers = Offers(state)
        for name in self._concerned(changed, now):
            replica, line = state.replicas[name], self._lines[name]
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

    def hear(self, name: str, line: Line, identity: bytes, now: float) -> None:
        """Note a message of a replica, to which something may have to be said."""
        line.identity, line.heard_at = identity, now
        self._heard.add(name)

    def _concerned(self, changed: set[str], now: float) -> list[str]:
        """Replicas that may be due a message: those that spoke or whose directive changed, and at times all."""
        heard, self._heard = self._heard, set()
        if now - self._scanned_at < _SCAN_S:
            return sorted((changed | heard) & self._state.replicas.keys())
        self._scanned_at = now
        for name in self._lines.keys() - self._state.replicas.keys():
            del self._lines[name]
        return list(self._state.replicas)

    def failing(self, now: float, control: ControlConfig, is_there: IsThere) -> list[tuple[str, str, str]]:
        """Names and incarnations of replicas that are to be given up, and why."""
        found = []
        for name, line in self.items():
            quiet_s, idle_s = now - line.heard_at, now - line.moved_at
            if quiet_s > control.lost_after_s:
                reason = f"silent for {control.lost_after_s:g} s (control.lost_after_s)"
            elif line.doing and not line.waits and idle_s > control.progress_timeout_s:
                reason = f"hung: no progress for {idle_s:.0f} s (control.progress_timeout_s) while {line.doing}"
            elif quiet_s > _QUIET_BEATS * control.heartbeat_s and self._is_cut_off(name, line, now, is_there):
                reason = "its connection is closed: its process has ended, or cannot be reached"
            else:
                continue
            found.append((name, line.incarnation, reason))
        return found

    def were_heard(self, names: Iterable[str]) -> bool:
        """True if replicas were all heard under this controller."""
        return all(self._lines[name].identity for name in names)

    def is_stalled(self, names: Iterable[str], now: float, timeout_s: float) -> bool:
        """True if some replicas wait for each other for too long, and none of them gets on with anything."""
        lines = [line for name in names if (line := self._lines.get(name)) is not None]
        late = [bool(line.doing) and now - line.moved_at > timeout_s for line in lines]
        return any(late) and all(is_late or not line.doing for line, is_late in zip(lines, late, strict=True))

    def _is_cut_off(self, name: str, line: Line, now: float, is_there: IsThere) -> bool:
        """True if a connection is closed: one who lives would have made another one, and beaten, by now."""
        if not line.identity or now - line.probed_at < PROBE_S:
            return False
        line.probed_at = now
        return not is_there(name, line)

    def excuse(self, seconds: float) -> None:
        """Forgive a silence during which nobody listened."""
        for line in self._lines.values():
            line.heard_at += seconds
            line.moved_at += seconds
