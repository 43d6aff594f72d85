"""The failure detector: time alone tells who is gone, silent, hangs or has not come, and what may be tried again.

Time is handed in, in seconds of any monotonic clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Final, get_args

import attrs

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.connections import IsThere, Lines
from cosmos_core.control.machine import membership, recovery, turns
from cosmos_core.control.machine.events import GroupStalled, JoinTimedOut, RegroupDue, RolledBack
from cosmos_core.control.write_ahead_log import WriteAheadLog
from cosmos_core.transport.messages import Role

_LOG: Final = logging.getLogger(__name__)

_REGROUP_S: Final = 0.5
_SETTLE_S: Final = 0.5
"""Policy replicas that are left may be about to say that they have taken over the newest weights."""
_LOOK_S: Final = 0.09
"""Between two looks at everybody: what is only told by time can wait that long."""


@attrs.define
class _Since:
    """Since when something has been the case."""

    began_at: float = 0.0
    is_so: bool = False

    def lasts(self, now: float, *, holds: bool) -> float:
        """Seconds for which it has held; 0 while it does not."""
        if not (holds and self.is_so):
            self.began_at, self.is_so = now, holds
        return now - self.began_at


@attrs.define
class _Missing:
    """Since when replicas of each role have been missing, or the run last came nearer to what it waits for.

    Pools are made one after the other at a start: what joins lets all go on waiting, but not again once it was lost.
    """

    least: dict[Role, int] = attrs.field(factory=dict)
    began_at: dict[Role, float] = attrs.field(factory=dict)

    def lasts(self, now: float, lacking: Mapping[Role, int], *, can_come: bool) -> float:
        """Seconds for which a role has been lacking replicas, the longest; 0 while none is, or none can come."""
        is_nearer = any(lacking.get(role, 0) < least for role, least in self.least.items())
        for role in get_args(Role):
            number = lacking.get(role, 0)
            self.least[role] = min(number, self.least.get(role, number))
        earlier = {} if is_nearer or not can_come else self.began_at
        self.began_at = {role: earlier.get(role, now) for role in lacking}
        return max((now - began_at for began_at in self.began_at.values()), default=0.0)


class FailureDetector:
    """Declares silent replicas lost, and records other things that come true with time, such as a deadline."""

    def __init__(self, log: WriteAheadLog, lines: Lines, control: ControlConfig, now: float) -> None:
        self._log: Final = log
        self._lines: Final = lines
        self._control: Final = control
        self._ticked_at = now
        self._looked_at = -math.inf
        self._missing: Final = _Missing()
        self._regrouping: Final = _Since()
        self._headless: Final = _Since()
        self._generation = 0
        self._ordered_at = now

    def look(self, now: float, is_there: IsThere) -> None:
        """Let time pass; `is_there` tells whether a replica is connected, as far as that is known."""
        state, control = self._log.state, self._control
        paused = now - self._ticked_at - 2 * control.heartbeat_s
        self._ticked_at = now
        if paused > 0:
            # This process did not run: what was said meanwhile waits at the socket, nobody was silent.
            self._lines.excuse(paused)
        if state.outcome or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        for name, incarnation, reason in self._lines.failing(now, control, is_there):
            self._log.lose(name, incarnation, reason)
        self._look_at_group(now)
        if self._is_headless(now):
            _LOG.warning("all policy replicas were lost at step %d; going back to a checkpoint", state.step)
            self._log.record(RolledBack(step=recovery.newest_kept(state)))
        missing = {role: lacking for role, (lacking, _) in membership.missing(state).items()}
        can_come = any(turns.may_wake(state, role) for role in missing)
        if self._missing.lasts(now, missing, can_come=can_come) > control.join_timeout_s:
            self._log.record(JoinTimedOut(timeout_s=control.join_timeout_s))
        if self._regrouping.lasts(now, holds=state.is_regrouping) > _REGROUP_S:
            self._log.record(RegroupDue())

    def _is_headless(self, now: float) -> bool:
        """True if the newest weights are gone, and nobody who is left will say that it has them after all.

        Who was not heard since this controller was started is waited for until it is, or is lost.
        """
        state = self._log.state
        is_headless, left = recovery.is_headless(state), state.members["policy"]
        lasts_s = self._headless.lasts(now, holds=is_headless and self._lines.were_heard(left))
        return is_headless and (not left or lasts_s > _SETTLE_S)

    def _look_at_group(self, now: float) -> None:
        """Note it if the members of the gradient group wait for each other for ever."""
        generation, timeout_s = self._log.state.generation, self._control.progress_timeout_s
        number = 0 if generation is None else generation.order.generation
        if number != self._generation:
            self._generation, self._ordered_at = number, now
        if generation is None or now - self._ordered_at <= timeout_s:
            return
        if self._lines.is_stalled(generation.order.members, now, timeout_s):
            self._log.record(GroupStalled(generation=number, timeout_s=timeout_s))
