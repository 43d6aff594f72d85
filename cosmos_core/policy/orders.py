"""Brings directives to a policy replica, the same to each of its processes.

The leader hears it from the controller and passes it on before it acts on it, so that all processes make the same moves
in the same order. What depends on time, such as when waiting has become pointless, the leader decides.
"""

from __future__ import annotations

import threading
from typing import Final

from cosmos_core.policy.processes.world import World
from cosmos_core.replica.client import ControlClient
from cosmos_core.replica.health_channel import HealthChannel
from cosmos_core.transport.codec import Codec
from cosmos_core.transport.directives import PolicyDirective
from cosmos_core.transport.reports import Report

_CODEC: Final = Codec((PolicyDirective,))

STOP: Final = PolicyDirective(generation=None, train=None, publish=-1, retain=-1, checkpoint=-1, stop=True)
"""The directive that ends a process."""


class Orders:
    """Directives of a process of a policy replica, which the leader passes on, and its reports, which it makes.

    Args:
        world: The processes of the replica.
        line: Where the leader says that waiting has become pointless.
    """

    def __init__(self, world: World, line: HealthChannel) -> None:
        self._world: Final = world
        self._line: Final = line

    def next(self, timeout_s: float) -> PolicyDirective | None:  # noqa: ARG002 - the leader waits
        """The next directive; None if none came within `timeout_s`. All processes of the replica call it."""
        data = self._world.share(b"")
        found: PolicyDirective | None = _CODEC.decode(data) if data else None
        return found

    def is_pointless(self, generation: int) -> bool:
        """True if there is no use in waiting for the members of a generation any longer."""
        return self._line.abandoned >= generation

    def report(self, report: Report) -> None:
        """Tell the controller, in the name of the replica: the leader does, which reports the same."""

    def set_step(self, step: int) -> None:
        """Note the step whose weights the replica holds: the leader does."""


class LeaderOrders(Orders):
    """Directives for the process that speaks with the controller.

    Args:
        controller: The line to it.
        world: The processes of the replica.
        line: Tells the others that waiting has become pointless.
        stop: Set when the process shall end.
    """

    def __init__(self, controller: ControlClient, world: World, line: HealthChannel, stop: threading.Event) -> None:
        super().__init__(world, line)
        self._controller: Final = controller
        self._stop: Final = stop
        self._revision = 0
        self._unread: PolicyDirective | None = None

    def next(self, timeout_s: float) -> PolicyDirective | None:
        """The newest directive that was not acted on."""
        if not self._stop.is_set():
            self._look(timeout_s if self._unread is None else 0.0)
        found, self._unread = self._unread, None
        if self._stop.is_set():
            found = STOP
        if self._world.size > 1:
            self._world.share(_CODEC.encode(found) if found is not None else b"")
        return found

    def is_pointless(self, generation: int) -> bool:
        """True if the generation is given up, or the end is ordered."""
        self._look(0.0)
        unread = self._unread
        newer = unread.generation if unread is not None else None
        is_over = self._stop.is_set() or (unread is not None and (unread.stop or unread.leave))
        # Without an order the generation is given up, and whether this replica is of the next one is not known yet.
        is_given_up = unread is not None and (newer is None or newer.generation > generation)
        if is_over or is_given_up:
            self._line.abandon(generation)
            return True
        return False

    def report(self, report: Report) -> None:
        """Tell the controller."""
        self._controller.report(report)

    def set_step(self, step: int) -> None:
        """Note the step whose weights the replica holds."""
        self._controller.set_step(step)

    def _look(self, timeout_s: float) -> None:
        found = self._controller.wait_directive(self._revision, timeout_s)
        if found is not None:
            self._revision = found.revision
            self._unread = found.policy or self._unread
