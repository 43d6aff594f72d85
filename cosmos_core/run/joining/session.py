"""One replica that joins a run: started, shown, started again when it is killed, ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cosmos_core.control.machine.state import State
from cosmos_core.errors import ReplicaError
from cosmos_core.replica.exits import LOST
from cosmos_core.run.files.announcement import announced
from cosmos_core.run.following.follower import Follower
from cosmos_core.run.following.observer import Observer
from cosmos_core.run.joining.finding import Joining
from cosmos_core.run.launch import Launcher
from cosmos_core.run.launch.local import LocalLauncher
from cosmos_core.run.petitions import Petitions
from cosmos_core.run.supervising.fleet import Fleet, Member
from cosmos_core.run.supervising.interrupts import Interrupts
from cosmos_core.run.supervising.keeper import Keeper
from cosmos_core.run.supervising.roster import specs_of
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.requests import Drain

_ANSWER_S: Final = 10.0
_POLL_S: Final = 0.1
_SHOW_S: Final = 5.0
_END_S: Final = 5.0
_GRACE_S: Final = 3.0
_PART_S: Final = 1.0
_INTERRUPTED: Final = 130
_SILENCE_S: Final = 10.0
"""After which a controller is taken to be away: it is heard every second."""

Say = Callable[[str], None]


def join(joining: Joining, say: Say) -> int:
    """Start the replica, show what it does, and see to it that it ends; nothing is left running.

    Args:
        joining: As `prepare` made it.
        say: Told what happens.

    Returns:
        0 when the run ended or the replica has left it; 1 when it failed; 75 when the run goes on at another address;
        130 when a second Ctrl-C ended it.

    Raises:
        CosmosError: It cannot join.
    """
    job = joining.job
    observer = Observer(joining.address, job.run_id, person_key(job.keys, may_ask=True))
    launcher = LocalLauncher(job.logs)
    try:
        session = _Session(joining, observer, launcher, say)
        with session.interrupts.counted():
            try:
                session.check()
                return session.follow()
            finally:
                launcher.stop(_GRACE_S)
    finally:
        observer.close()


class _Session:
    """One replica, from its start to its end."""

    def __init__(self, joining: Joining, observer: Observer, launcher: Launcher, say: Say) -> None:
        self._joining: Final = joining
        self._observer: Final = observer
        self._launcher: Final = launcher
        self._say: Final = say
        self._follower: Final = Follower()
        self._petitions: Final = Petitions()
        self.interrupts: Final = Interrupts()
        specs = specs_of(joining.job, joining.address, [(joining.role, joining.name)], joining.checkpoint)
        self._keeper: Final = Keeper(joining.job, Fleet(launcher, specs), self._petitions)
        self._over_since = float("inf")
        self._drain = ""
        self._is_refused = False
        self._is_silent = False
        self._told: Final = announced(joining.job)
        self._shown_at = time.monotonic()

    def check(self) -> None:
        """Hear from the controller, and find the run going on and the name free.

        Raises:
            ReplicaError: The run cannot be joined.
            TransportError: The controller refuses whoever asks.
        """
        where, name = self._joining.address, self._joining.name
        deadline = time.monotonic() + _ANSWER_S
        while self._observer.num_gauges < 1 or self._follower.state is None:
            self._follower.fold(self._observer.poll(_POLL_S))
            if time.monotonic() > deadline:
                if self._observer.refusal:
                    raise ReplicaError(f"the controller at {where} shows nothing: {self._observer.refusal}")
                raise ReplicaError(
                    f"no controller of this run answers at {where} within {_ANSWER_S:g} s; check that the run goes on "
                    f"(cosmos status {self._joining.job.directory}), that the address is the one in its "
                    "controller.json, and, from another machine, that control.bind is not 127.0.0.1 and that no "
                    "firewall closes the port"
                )
            if self.interrupts.number:
                raise ReplicaError("stopped by Ctrl-C before the controller answered")
        state = self._follower.state
        if state.outcome:
            raise ReplicaError(f"{self._joining.job.directory}: the run is over ({state.outcome})")
        if name in state.replicas:
            raise ReplicaError(f"--name {name}: the run has a replica of this name; choose another, or none")

    def follow(self) -> int:
        """Run the replica to its end; the exit code."""
        (member,) = self._keeper.fleet.start_all()
        name = member.name
        self._say(f"{name}: starting, to join {self._joining.address}; its log is {self._joining.job.logs}/{name}.log")
        while (code := self._turn(member)) is None:
            pass
        return code

    def _turn(self, member: Member) -> int | None:
        """See what has happened for a moment, and to what is to be done; the exit code, at the end."""
        self._follower.fold(self._observer.poll(_POLL_S))
        now, state = time.monotonic(), self._follower.state
        assert state is not None, "it was seen before anything was started"
        for ended in self._launcher.exits():
            self._keeper.fleet.note(ended, now)
        self._look(member, state)
        self._end_in_time(member, state, now)
        if self._keeper.fleet.gone(now) and (code := self._on_gone(member, state, now)) is not None:
            return code
        if self.interrupts.number > 1:
            self._say(f"{member.name}: killed by a second Ctrl-C")
            return _INTERRUPTED
        if self._has_moved():
            return LOST
        self._answer_interrupt(member)
        self._petitions.send(self._observer, now)
        self._show(state, now)
        return None

    def _look(self, member: Member, state: State) -> None:
        had_joined = member.has_joined
        self._keeper.look(state)
        if member.has_joined and not had_joined and not member.given_up:
            self._say(f"{member.name}: joined; Ctrl-C lets it finish what it has begun, and leave")

    def _end_in_time(self, member: Member, state: State, now: float) -> None:
        """Kill what lingers after the run, and what was interrupted before it had a part in it."""
        if state.outcome:
            self._over_since = min(self._over_since, now)
        if now > self._over_since + _END_S or (self.interrupts.number and not member.has_joined):
            self._keeper.fleet.kill(member)

    def _answer_interrupt(self, member: Member) -> None:
        if self.interrupts.number and member.has_joined and not self._drain:
            self._drain = self._petitions.add(Drain(name=member.name))
            self._say(f"{member.name}: leaving, as soon as it has finished what it has begun; Ctrl-C again kills it")
        if not self._is_refused and (refusal := self._observer.answers.get(self._drain)):
            self._is_refused = True
            self._say(f"{member.name}: it cannot leave: {refusal}; Ctrl-C again kills it")

    def _has_moved(self) -> bool:
        """Whether a controller that is not heard was followed by one at another address; the silence is said once."""
        name, silence_s = self._joining.name, self._observer.silence_s
        if silence_s < _SILENCE_S:
            if self._is_silent:
                self._say(f"{name}: the controller answers again")
            self._is_silent = False
            return False
        if not self._is_silent:
            self._is_silent = True
            self._say(
                f"{name}: the controller at {self._joining.address} has said nothing for {silence_s:.0f} s; waiting "
                "for it (Ctrl-C twice ends this)"
            )
        told = announced(self._joining.job)
        if told is None or (self._told is not None and told.address == self._told.address):
            return False
        self._say(
            f"{name}: ends: the run goes on with another controller, at {told.address}; "
            f"join it again with cosmos replica {self._joining.role} --run {self._joining.job.directory}"
        )
        return True

    def _show(self, state: State, now: float) -> None:
        replica = state.replicas.get(self._joining.name)
        if self._is_silent or replica is None or now - self._shown_at < _SHOW_S:
            return
        self._shown_at = now
        held = replica.step if replica.role == "policy" else replica.version
        doing = f", {len(replica.leases)} prompts in flight" if replica.role == "rollout" else ""
        weights = "no weights yet" if held < 0 else f"weights of step {held}"
        self._say(f"{replica.name}: step {state.step}/{state.settings.last_step}, {weights}{doing}")

    def _on_gone(self, member: Member, state: State, now: float) -> int | None:
        """Say how the replica ended; the exit code, unless it is started again or more will be known."""
        name = member.name
        if name in state.departed:
            self._say(f"{name}: has left the run")
            return 0
        if state.outcome:
            self._say(f"{name}: the run is over ({state.outcome})")
            return 1 if state.outcome == "failed" else 0
        if self.interrupts.number and not member.has_joined:
            self._say(f"{name}: stopped before it had joined")
            return _INTERRUPTED
        fate = self._keeper.attend(member, state, now, may_restart=not self.interrupts.number)
        if fate is None:
            return None
        if fate.kind == "started":
            self._say(fate.words)
            return None
        self._say(fate.words if fate.kind == "failed" else f"{fate.words}; it is not started again")
        self._part(member)
        return 1

    def _part(self, member: Member) -> None:
        """Spare the run the time in which a replica that was killed would be missed."""
        deadline = time.monotonic() + _PART_S
        while (state := self._follower.state) is not None and time.monotonic() < deadline:
            if not member.has_joined or member.incarnation in state.fenced:
                return
            self._petitions.send(self._observer, time.monotonic())
            self._follower.fold(self._observer.poll(_POLL_S))
