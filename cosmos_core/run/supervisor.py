"""Starts the processes of a run, follows it, and sees to it that it ends, whatever happens.

The supervisor decides nothing about training. It watches the journal through the controller and the exit codes of
the processes, starts those again that were killed, passes Ctrl-C on as a request to stop, and leaves nothing running.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs

from cosmos_core.config.job import Job, stages
from cosmos_core.control.journal import entries
from cosmos_core.control.live.diagnosis import findings
from cosmos_core.control.machine.progress import best_checkpoint
from cosmos_core.control.machine.state import State
from cosmos_core.errors import CheckpointError, ReplicaError, TransportError
from cosmos_core.observe.live import Progress, View
from cosmos_core.policy.checkpoints.checkpoint import mark_best
from cosmos_core.run.address import address_file, page_words, read_address
from cosmos_core.run.fleet import CONTROLLER, Fleet, Member, controller_spec, replica_specs, role_of
from cosmos_core.run.follower import Follower, Notify, progress_of, starting, unsaved, waiting, waits_for
from cosmos_core.run.interrupts import Interrupts
from cosmos_core.run.launch import Exit, Launcher
from cosmos_core.run.observer import Observer
from cosmos_core.run.requests import PendingRequests
from cosmos_core.run.restart_policy import Decision, RestartPolicy, Restarts, cause_of, last_words
from cosmos_core.run.resume import Start
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.messages import Role, Stop


@attrs.frozen(kw_only=True)
class Ending:
    """The end of a run: `outcome` is `finished`, `stopped` or `failed`; `reason` says why, if there is more to say."""

    outcome: str
    reason: str = ""


def with_cause(reason: str, failure: Exit) -> str:
    """The controller's reason, and what ended a process first unless that reason says it already."""
    replica, _, rank = failure.name.partition(".")
    is_said = bool(failure.error) and failure.error in reason
    # A replica's leader tells the controller which of the others is gone.
    is_said = is_said or (bool(rank) and f"{replica} rank {rank}: " in reason)
    words = "" if is_said else f"{failure.name}: {last_words(failure)}"
    return "\n".join(filter(None, (reason, words)))


@contextlib.contextmanager
def reserved(bind: str, port: int) -> Iterator[int]:
    """A port that is bound and not listened on: the kernel gives it to nobody, and who asks for it by number has it.

    Port 0 takes a free one. A TransportError says that it cannot be had.
    """
    host = "" if bind == "*" else bind.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as held:
        try:
            # libzmq sets it too: two that have it may be bound to one port as long as one of them listens at most.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, port))
        except OSError as error:
            raise TransportError(
                f"port {port} of {bind} cannot be had ({error.strerror or error}); set control.port to another one, or "
                "to 0 for any free one, and control.bind to an address of this machine"
            ) from None
        yield held.getsockname()[1]


_ROLES: Final[tuple[Role, ...]] = ("policy", "rollout")


class TerminalLog:
    """Says what happens in a session and its supervisor does not say itself.

    How the replicas that the supervisor started (`is_own`) are lost, it says itself: with their errors, and with what
    comes next. That one has left as it was asked to is the controller's word: its process may end when the run is over.
    The state that an earlier session came to is `earlier`: that session has told of it.
    """

    def __init__(
        self, job: Job, say: Callable[[str], None], *, is_own: Callable[[str], bool], earlier: State | None = None
    ) -> None:
        self._job: Final = job
        self._say: Final = say
        self._is_own: Final = is_own
        self._known: Final = dict(earlier.status_details) if earlier is not None else {}
        self._told: Final[set[str]] = set()
        self._draining: frozenset[str] = frozenset()
        self._basis: tuple[object, ...] = ()
        self._absent: Final[set[Role]] = set()

    def hear(self, hook: str, **arguments: Any) -> None:
        """Take in something that happened, as hooks are told of it (`follower.Notify`)."""
        match hook, arguments:
            case "cosmos_replica_joined", {"replica": name, "role": role} if role in self._absent or not self._is_own(
                name
            ):
                self._say(f"{name} has joined")
            case "cosmos_replica_left", {"replica": name, "reason": "drained"}:
                self._say(f"{name} has left")
            case "cosmos_replica_left", {"replica": name, "reason": reason} if not self._is_own(name):
                self._say(f"{name} was lost: {reason}")
            case "cosmos_setting_changed", {"step": step, "key": key, "before": before, "after": after}:
                self._say(f"{key}: {before} -> {after} from step {step} on")

    def look(self, state: State) -> None:
        """Say what is new of a state: problems, why it does not learn, who shall leave, which role has nobody left."""
        # The first of each kind; all are counted in the summary.
        for kind, detail in state.status_details.items():
            # Not by the words: the same ones, said again, are news as well.
            if kind not in self._told and self._known.get(kind) is not detail:
                self._told.add(kind)
                self._say(f"{kind}: {detail}")
        basis = (state.stage_index, [*state.steps[-1:]], sum(state.ledger.dropped.values()), len(state.evaluations))
        # Of the same steps and prompts they are the same; to look takes a millisecond, and news come all the time.
        for finding in findings(state) if basis != self._basis else ():
            if finding.code not in self._told:
                self._told.add(finding.code)
                self._say(str(finding))
        draining = frozenset(state.draining)
        for name in sorted(draining - self._draining):
            self._say(f"{name} is leaving, as soon as it has finished what it has begun")
        self._draining, self._basis = draining, basis
        for role in _ROLES:
            if state.members[role] or not state.is_complete(role):
                self._absent.discard(role)
            elif role not in self._absent and not state.outcome:
                self._absent.add(role)
                self._say(
                    f"no {role} replica is left: the run fails unless one joins within "
                    f"{self._job.recipe.control.join_timeout_s:g} s (control.join_timeout_s); "
                    f"cosmos replica {role} --run {self._job.directory} adds one"
                )


_POLL_S: Final = 0.1
_KILL: Final = 2  # interrupts that end a run at once
_LISTEN_TIMEOUT_S: Final = 60.0
_VERDICT_S: Final = 3.0  # how long the controller may take to see a failure that we saw
_SILENCE_S: Final = 3.0  # after which figures are of before; a controller that is there answers within a second
_END_S: Final = 5.0  # how long processes may take to end after the run has; all that matters is saved by then
_GRACE_S: Final = 3.0  # between TERM and KILL


class Supervisor:
    """One run's processes, from start to end."""

    def __init__(self, job: Job, launcher: Launcher, view: View, notify: Notify, follower: Follower) -> None:
        self._job: Final = job
        self._launcher: Final = launcher
        self._view: Final = view
        self._notify: Final = notify
        self._follower: Final = follower
        self._stages: Final = stages(job.recipe)
        self._interrupts: Final = Interrupts()
        self._best: int | None = None
        self._resumed = 0
        self._first_step = 0
        self._is_stopping = False
        self._requests: Final = PendingRequests()
        self._restarts: Final = Restarts(job.recipe.launch.restarts)
        self._restart_policy = RestartPolicy(job, Fleet(launcher, ()), self._requests)
        self._log: Final = TerminalLog(
            job, view.say, is_own=lambda name: name in self._restart_policy.fleet.names, earlier=follower.state
        )
        self._port = 0
        self._controller_since = float("-inf")
        self._gauges: dict[str, dict[str, float]] = {}
        self._failure: Exit | None = None
        self._failed_at = 0.0

    def run(self, start: Start) -> Ending:
        """Run to the end. Whatever happens, no process of the run is left when this returns or raises."""
        self._resumed = self._follower.num_resumed + (start.step is not None)
        self._first_step = start.step or 0
        control = self._job.recipe.control
        with self._interrupts.counted(), reserved(control.bind, control.port) as self._port:
            try:
                observer = self._launch(start)
                observer.last_sequence = self._follower.last_sequence
                try:
                    self._follow(observer)
                finally:
                    observer.close()
            finally:
                self._launcher.stop(_GRACE_S)
                self._catch_up()
        return self._ending()

    def _launch(self, start: Start) -> Observer:
        """Start the controller, and the replicas once it listens."""
        address_file(self._job).unlink(missing_ok=True)
        self._launcher.start(controller_spec(self._job, resume_step=start.step, port=self._port))
        self._controller_since = time.monotonic()
        deadline = time.monotonic() + _LISTEN_TIMEOUT_S
        while (address := read_address(self._job)) is None:
            for ended in self._launcher.exits():
                raise ReplicaError(f"the controller could not start: {last_words(ended)}")
            if self._interrupts.number >= _KILL:
                raise ReplicaError("killed by a second Ctrl-C before the controller listened")
            if time.monotonic() > deadline:
                raise ReplicaError(
                    f"the controller did not listen within {_LISTEN_TIMEOUT_S:g} s; see {self._job.logs}"
                )
            time.sleep(_POLL_S / 5)
        for words in page_words(self._job):
            self._view.say(words)
        fleet = Fleet(self._launcher, replica_specs(self._job, address, start.checkpoint))
        self._restart_policy = RestartPolicy(self._job, fleet, self._requests)
        fleet.start_all()
        return Observer(address, self._job.run_id, person_key(self._job.keys))

    def _follow(self, observer: Observer) -> None:
        """Fold, show and pass on until the run has ended and its processes with it."""
        ended_at = None
        while self._interrupts.number < _KILL:
            self._follower.fold(observer.poll(_POLL_S), self._hear)
            self._gauges |= observer.gauges
            self._note_best()
            if self._follower.state is not None and self._is_current():
                self._log.look(self._follower.state)
            self._view.show(self._progress(observer.silence_s))
            self._answer_interrupt()
            self._watch_silence(observer)
            self._watch_exits(observer)
            self._requests.send(observer, time.monotonic())
            if self._is_current() and self._follower.has_ended and ended_at is None:
                ended_at = time.monotonic()
            if not self._launcher.running() or (ended_at and time.monotonic() > ended_at + _END_S):
                return
            if self._failure and not self._has_outcome() and time.monotonic() > self._failed_at + _VERDICT_S:
                return

    def _progress(self, silence_s: float) -> Progress:
        if not self._is_current():
            elapsed_s = self._follower.timeline.elapsed_s(None)
            return starting(self._stages, self._first_step, elapsed_s=elapsed_s)
        if silence_s > _SILENCE_S and not self._has_outcome():
            return waiting(self._follower, self._stages, heard=time.time() - silence_s)
        return progress_of(self._follower, self._stages, self._gauges, now=time.time())

    def _hear(self, hook: str, **arguments: Any) -> None:
        """Something happened: hooks are told of it, and the terminal of some of it."""
        self._log.hear(hook, **arguments)
        self._notify(hook, **arguments)

    def _note_best(self) -> None:
        """Mark the best checkpoint, so that the replica that removes old ones keeps it."""
        state = self._follower.state
        best = best_checkpoint(state) if state is not None and self._is_current() else None
        if best is None or best == self._best:
            return
        self._best = best
        try:
            mark_best(self._job.checkpoints, best)
        except CheckpointError as error:
            self._view.say(f"the best checkpoint could not be marked: {error}")

    def _answer_interrupt(self) -> None:
        if self._interrupts.number and not self._is_stopping:
            self._is_stopping = True
            self._requests.add(Stop())
            state = self._follower.state
            self._view.say(f"Stopping: waiting for {waits_for(state)}. Ctrl-C again to kill the run{unsaved(state)}.")

    def _watch_exits(self, observer: Observer) -> None:
        """See who has ended although the run had not, and whether another may take its place."""
        now = time.monotonic()
        for ended in self._launcher.exits():
            if ended.name == CONTROLLER:
                # It ends after the run: what it did last may not have been told yet.
                self._catch_up()
                observer.last_sequence = self._follower.last_sequence
                self._on_controller(ended, now)
            else:
                self._restart_policy.fleet.note(ended, now)
        state = self._follower.state
        if state is None or not self._is_current():
            return
        self._restart_policy.look(state)
        for member in self._restart_policy.fleet.gone(now):
            self._on_replica(member, state, now)

    def _watch_silence(self, observer: Observer) -> None:
        """End a controller that lives and says nothing: as it gives replicas up, it is given up itself.

        One that has not been heard since it was started may take as long as the first one may to listen.
        """
        limit_s = self._job.recipe.control.lost_after_s
        there_for_s = time.monotonic() - self._controller_since
        silence_s = observer.silence_s
        if silence_s > there_for_s:
            silence_s, limit_s = there_for_s, max(limit_s, _LISTEN_TIMEOUT_S)
        if silence_s > limit_s and CONTROLLER in self._launcher.running():
            self._view.say(f"{CONTROLLER} has said nothing for {limit_s:g} s; it is ended")
            self._controller_since = time.monotonic()
            self._launcher.kill(CONTROLLER)

    def _on_controller(self, ended: Exit, now: float) -> None:
        state = self._follower.state
        if state is not None and self._follower.has_ended and self._is_current():
            self._restart_policy.fleet.kill_absent(state)
            return
        if cause_of(ended) != "killed":
            self._fail(ended, now)
        elif self._restarts.take(CONTROLLER, now):
            self._view.say(f"{CONTROLLER} ended: {last_words(ended)}; it is started again")
            self._controller_since = now
            self._launcher.start(controller_spec(self._job, resume_step=None, port=self._port))
        else:
            self._fail(ended, now)

    def _on_replica(self, member: Member, state: State, now: float) -> None:
        if self._has_outcome() or self._failure is not None:
            return
        decision = self._restart_policy.decide(member, state, now)
        match decision:
            case None:
                pass
            case Decision(kind="started", words=words):
                self._view.say(words)
            case Decision(kind="left"):
                self._restart_policy.fleet.forget(member)
            case Decision(kind="refused", words=words) if state.is_complete(role_of(member.specs[0])):
                self._view.say(f"{words}; {member.name} is not started again, the run goes on without it")
                self._restart_policy.fleet.forget(member)
            case Decision(kind="spent", words=words) if self._is_spare(member, state):
                self._view.say(f"{words}; the run goes on without it (launch.restarts)")
                self._restart_policy.fleet.forget(member)
            case _:
                self._fail(member.end, now)

    def _is_spare(self, member: Member, state: State) -> bool:
        """True if the run has others that do the work of a replica which has ended."""
        role = role_of(member.specs[0])
        return state.has_started and any(
            replica.role == role for replica in state.replicas.values() if replica.name != member.name
        )

    def _fail(self, ended: Exit, now: float) -> None:
        """A process has ended, and the run cannot go on."""
        self._view.say(f"{ended.name} ended: {last_words(ended)}")
        if self._failure is None:
            self._failure, self._failed_at = ended, now

    def _is_current(self) -> bool:
        """True if the state is of this session: a resumed run's journal begins with how it ended before."""
        return self._follower.state is not None and self._follower.num_resumed == self._resumed

    def _has_outcome(self) -> bool:
        state = self._follower.state
        return state is not None and bool(state.outcome) and self._is_current()

    def _catch_up(self) -> None:
        """Fold what the journal holds and no notice brought; its writer has ended by now."""
        if self._job.journal.exists() and not (self._is_current() and self._follower.has_ended):
            self._follower.fold(entries(self._job.journal), self._hear)
        if self._follower.state is not None and self._is_current():
            self._log.look(self._follower.state)
        self._note_best()

    def _ending(self) -> Ending:
        state, failure = self._follower.state, self._failure
        if state is not None and self._has_outcome():
            reason = with_cause(state.reason, failure) if failure and state.outcome == "failed" else state.reason
            return Ending(outcome=state.outcome, reason=reason)
        if self._interrupts.number >= _KILL:
            return Ending(outcome="stopped", reason=f"killed by a second Ctrl-C{unsaved(state)}")
        return Ending(
            outcome="failed", reason=with_cause("", failure) if failure else "the controller ended before the run did"
        )
