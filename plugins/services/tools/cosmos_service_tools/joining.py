"""One replica that joins a run: started, shown, started again when it is killed, ended."""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job
from cosmos_core.control.machine.state import State
from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.recipe import selections
from cosmos_core.replica.lifetime import LOST
from cosmos_core.run.address import announced
from cosmos_core.run.fleet import Fleet, Member, replica_specs
from cosmos_core.run.follower import Follower
from cosmos_core.run.interrupts import Interrupts
from cosmos_core.run.launch import Launcher
from cosmos_core.run.launch.local import LocalLauncher
from cosmos_core.run.observer import Observer
from cosmos_core.run.plan import check_joins
from cosmos_core.run.provenance import joined_with
from cosmos_core.run.requests import PendingRequests
from cosmos_core.run.restart_policy import RestartPolicy
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.messages import Drain, Role
from cosmos_service_tools.runs import RUNS, run_at, told_address

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_STRANGE: Final = re.compile(r"[^A-Za-z0-9]+")


@attrs.frozen(kw_only=True)
class NewReplica:
    """A replica that joins a run at its controller's address; without `checkpoint` it gets the others' weights."""

    job: Job
    address: str
    role: Role
    name: str
    checkpoint: str | None = None


def find_run(controller: str | None, run: Path | None, runs: Path = RUNS) -> tuple[Path, str]:
    """The folder of a run and the address of its controller, `tcp://HOST:PORT`, of which one may be left out.

    The folder is then the one in `runs` whose controller listens at that address; the address is that the folder tells.
    """
    if run is not None:
        told = told_address(run)
        if not told and controller is None:
            raise ConfigError(f"{run}: no controller has listened for this run yet; start it with `cosmos run`")
        return run, controller or told
    if controller is None:
        raise ConfigError("give --controller ADDR, as in RUN/controller.json, or --run RUN")
    return run_at(controller, runs), controller


def prepare(role: Role, folder: Path, address: str, *, name: str | None, checkpoint: str | None) -> NewReplica:
    """Find out whether a replica can join; a CosmosError says why it cannot, and what to do."""
    job = load_job(folder)
    if role == "rollout" and not job.uses_rollouts:
        raise ConfigError(f"{folder}: the run learns from demonstrations only; it has no use for a rollout replica")
    if role == "rollout" and checkpoint is not None:
        raise ConfigError("--checkpoint is for policy replicas; a rollout replica gets its weights from them")
    installed = discover()
    records = [choose(kind, plugin, installed) for kind, plugin in selections(job.recipe)]
    if differences := joined_with(folder, records):
        raise ConfigError(
            f"{folder}: this machine has other code than the run: {'; '.join(differences)}. Install the same, or let "
            "the run go on with this: cosmos run --resume"
        )
    check_joins(job, role)
    if name is None:
        host = _STRANGE.sub("-", socket.gethostname().partition(".")[0]).strip("-") or "host"
        name = f"{role}-{host}-{secrets.token_hex(2)}"
    if not _NAME.fullmatch(name) or not name.startswith(f"{role}-"):
        raise ConfigError(f"--name {name}: a {role} replica is called {role}-…, of letters, digits, '_' and '-'")
    return NewReplica(job=job, address=address, role=role, name=name, checkpoint=checkpoint)


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


def join(new: NewReplica, say: Say) -> int:
    """Start the replica, show what it does, and see to it that it ends; nothing is left running.

    Returns:
        0 when the run ended or the replica has left it; 1 when it failed; 75 when the run goes on at another address;
        130 when a second Ctrl-C ended it.

    Raises:
        CosmosError: It cannot join.
    """
    job = new.job
    launcher = LocalLauncher(job.logs)
    with Observer(new.address, job.run_id, person_key(job.keys, may_ask=True)) as observer:
        session = _Session(new, observer, launcher, say)
        with session.interrupts.counted():
            try:
                session.check()
                return session.follow()
            finally:
                launcher.stop(_GRACE_S)


class _Session:
    """One replica, from its start to its end."""

    def __init__(self, new: NewReplica, observer: Observer, launcher: Launcher, say: Say) -> None:
        self._new: Final = new
        self._observer: Final = observer
        self._launcher: Final = launcher
        self._say: Final = say
        self._follower: Final = Follower()
        self._requests: Final = PendingRequests()
        self.interrupts: Final = Interrupts()
        specs = replica_specs(new.job, new.address, new.checkpoint, [(new.role, new.name)])
        self._restart_policy: Final = RestartPolicy(new.job, Fleet(launcher, specs), self._requests)
        self._over_since = float("inf")
        self._drain = ""
        self._is_refused = False
        self._is_silent = False
        self._told: Final = announced(new.job)
        self._shown_at = time.monotonic()

    def check(self) -> None:
        """Hear from the controller, and find the run going on and the name free."""
        where, name = self._new.address, self._new.name
        deadline = time.monotonic() + _ANSWER_S
        while self._observer.num_gauges < 1 or self._follower.state is None:
            self._follower.fold(self._observer.poll(_POLL_S))
            if time.monotonic() > deadline:
                if self._observer.refusal:
                    raise ReplicaError(f"the controller at {where} shows nothing: {self._observer.refusal}")
                raise ReplicaError(
                    f"no controller of this run answers at {where} within {_ANSWER_S:g} s; check that the run goes on "
                    f"(cosmos status {self._new.job.directory}), that the address is the one in its "
                    "controller.json, and, from another machine, that control.bind is not 127.0.0.1 and that no "
                    "firewall closes the port"
                )
            if self.interrupts.number:
                raise ReplicaError("stopped by Ctrl-C before the controller answered")
        state = self._follower.state
        if state.outcome:
            raise ReplicaError(f"{self._new.job.directory}: the run is over ({state.outcome})")
        if name in state.replicas:
            raise ReplicaError(f"--name {name}: the run has a replica of this name; choose another, or none")

    def follow(self) -> int:
        """Run the replica to its end; the exit code."""
        (member,) = self._restart_policy.fleet.start_all()
        name = member.name
        self._say(f"{name}: starting, to join {self._new.address}; its log is {self._new.job.logs}/{name}.log")
        while (code := self._turn(member)) is None:
            pass
        return code

    def _turn(self, member: Member) -> int | None:
        """See what has happened for a moment, and to what is to be done; the exit code, at the end."""
        self._follower.fold(self._observer.poll(_POLL_S))
        now, state = time.monotonic(), self._follower.state
        assert state is not None, "it was seen before anything was started"
        for ended in self._launcher.exits():
            self._restart_policy.fleet.note(ended, now)
        had_joined = member.has_joined
        self._restart_policy.look(state)
        if member.has_joined and not had_joined and not member.given_up:
            self._say(f"{member.name}: joined; Ctrl-C lets it finish what it has begun, and leave")
        # What lingers after the run, and what was interrupted before it had a part in it.
        if state.outcome:
            self._over_since = min(self._over_since, now)
        if now > self._over_since + _END_S or (self.interrupts.number and not member.has_joined):
            self._restart_policy.fleet.kill(member)
        if self._restart_policy.fleet.gone(now) and (code := self._on_gone(member, state, now)) is not None:
            return code
        if self.interrupts.number > 1:
            self._say(f"{member.name}: killed by a second Ctrl-C")
            return _INTERRUPTED
        if self._has_moved():
            return LOST
        self._answer_interrupt(member)
        self._requests.send(self._observer, now)
        self._show(state, now)
        return None

    def _answer_interrupt(self, member: Member) -> None:
        if self.interrupts.number and member.has_joined and not self._drain:
            self._drain = self._requests.add(Drain(name=member.name))
            self._say(f"{member.name}: leaving, as soon as it has finished what it has begun; Ctrl-C again kills it")
        if not self._is_refused and (refusal := self._observer.answers.get(self._drain)):
            self._is_refused = True
            self._say(f"{member.name}: it cannot leave: {refusal}; Ctrl-C again kills it")

    def _has_moved(self) -> bool:
        """True if a controller that is not heard was followed by one at another address; the silence is said once."""
        name, silence_s = self._new.name, self._observer.silence_s
        if silence_s < _SILENCE_S:
            if self._is_silent:
                self._say(f"{name}: the controller answers again")
            self._is_silent = False
            return False
        if not self._is_silent:
            self._is_silent = True
            self._say(
                f"{name}: the controller at {self._new.address} has said nothing for {silence_s:.0f} s; waiting "
                "for it (Ctrl-C twice ends this)"
            )
        told = announced(self._new.job)
        if told is None or (self._told is not None and told.address == self._told.address):
            return False
        self._say(
            f"{name}: ends: the run goes on with another controller, at {told.address}; "
            f"join it again with cosmos replica {self._new.role} --run {self._new.job.directory}"
        )
        return True

    def _show(self, state: State, now: float) -> None:
        replica = state.replicas.get(self._new.name)
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
        decision = self._restart_policy.decide(member, state, now, may_restart=not self.interrupts.number)
        if decision is None:
            return None
        if decision.kind == "started":
            self._say(decision.words)
            return None
        self._say(decision.words if decision.kind == "failed" else f"{decision.words}; it is not started again")
        self._part(member)
        return 1

    def _part(self, member: Member) -> None:
        """Spare the run the time in which a replica that was killed would be missed."""
        deadline = time.monotonic() + _PART_S
        while (state := self._follower.state) is not None and time.monotonic() < deadline:
            if not member.has_joined or member.incarnation in state.fenced:
                return
            self._requests.send(self._observer, time.monotonic())
            self._follower.fold(self._observer.poll(_POLL_S))
