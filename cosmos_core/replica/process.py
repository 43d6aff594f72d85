"""The frame of a replica's process: arguments, log, signals, and the one place where any error ends."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, NoReturn

import attrs

from cosmos_core.config.fingerprint import facts_of
from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job
from cosmos_core.devices import has_failed
from cosmos_core.errors import CosmosError, ProcessLostError, ReplicaError
from cosmos_core.observe import logs
from cosmos_core.plugins.recipe import plugin_versions
from cosmos_core.protocols.provider import Kind
from cosmos_core.replica.activity import Pulse, TakePulse
from cosmos_core.replica.client import ControlClient
from cosmos_core.replica.health_channel import words_of
from cosmos_core.replica.lifetime import LOST, REFUSED, bounded_life, call_later
from cosmos_core.transport.addresses import host_id, host_of, own_address, rack_id
from cosmos_core.transport.authentication import Keyring
from cosmos_core.transport.keys import replica_key
from cosmos_core.transport.messages import WIRE_VERSION, Hello, Refused, Role
from cosmos_core.transport.reports import Failed

_LOG: Final = logging.getLogger(__name__)

_FLUSH_S: Final = 2.0
_LAST_WORDS_S: Final = 1.0
_EXIT_S: Final = 10.0
_STUCK_S: Final = 5.0

_KINDS: Final[Mapping[Role, Collection[Kind]]] = {
    "policy": ("model", "algorithm", "dataset"),
    "rollout": ("model", "algorithm", "dataset", "reward", "engine", "environment"),
}
"""The kinds of plugins that a role uses."""


@attrs.define(kw_only=True, eq=False)
class RoleArgs:
    """The arguments of a role's main function.

    Attributes:
        name: This process's name: the replica's, and `.rank` after it unless the rank is 0.
        rank: Place of this process in its replica; the one of rank 0 speaks with the controller.
        session: Random per start of the run; shared by the processes of a replica of several.
        stop: Set when the process shall end (SIGTERM, or its parent ended).
        client: The line to the controller, once `connect` was called.
    """

    run_dir: Path
    job: Job
    role: Role
    name: str
    controller: str
    checkpoint: str | None = None
    rank: int = 0
    session: str = ""
    incarnation: str = attrs.field(factory=lambda: uuid.uuid4().hex[:12])
    stop: threading.Event = attrs.field(factory=threading.Event)
    client: ControlClient | None = None

    @property
    def replica(self) -> str:
        """The replica's name."""
        return self.name.removesuffix(f".{self.rank}") if self.rank else self.name

    @cached_property
    def keyring(self) -> Keyring:
        """The keys with which this process speaks to others."""
        return Keyring(self.job.keys, replica_key(self.job.keys, self.role, self.replica))

    @cached_property
    def address(self) -> str:
        """The address of this machine that whatever this process serves listens on, and others reach it at."""
        return own_address(self.job.recipe.control.bind, host_of(self.controller))

    def connect(
        self,
        *,
        endpoints: Mapping[str, str],
        step: int = 0,
        gauges: Callable[[], Mapping[str, float]] = dict,
        take_pulse: TakePulse = Pulse,
    ) -> ControlClient:
        """Start the line to the controller, which `run_role` closes; `endpoints` are what it serves, by purpose."""
        hello = Hello(
            wire=WIRE_VERSION,
            run_id=self.job.run_id,
            name=self.name,
            role=self.role,
            incarnation=self.incarnation,
            host=host_id(),
            rack=rack_id(),
            pid=os.getpid(),
            step=step,
            endpoints=dict(endpoints),
            facts=facts_of(self.job.recipe, plugin_versions(self.job.recipe, _KINDS[self.role])),
        )
        self.client = ControlClient(
            self.controller,
            hello,
            self.job.recipe.control.heartbeat_s,
            gauges,
            key=self.keyring.own,
            take_pulse=take_pulse,
            on_refused=_end_if_stuck,
        )
        self.client.start()
        return self.client

    def end(self, error: ReplicaError) -> NoReturn:
        """End at once because of another process of this replica, whatever the main thread is stuck in."""
        _LOG.error("%s", error)
        if isinstance(error, ProcessLostError):
            os._exit(LOST)
        _tell(str(error), self.client, _LAST_WORDS_S)
        os._exit(1)


def run_role(role: Role, main: Callable[[RoleArgs], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Run a role's main function as this process, and exit.

    Exit codes: 0 when `main` returned; 75 when the controller gave this replica up, another of its processes is gone,
    or its GPU has failed (the log says which), so that it may be started again; 77 when the controller refuses it, and
    would refuse another one in its place; 1 on any other error, after telling the controller; 143 when the process did
    not stop in time after SIGTERM.
    """
    options = _parser(role).parse_args(argv)
    logs.setup(options.run / "logs" / f"{options.name}.jsonl", options.name)
    faulthandler.enable()
    threading.excepthook = _log_thread_error
    stop = threading.Event()
    with bounded_life(stop):
        code = _supervise(role, main, options, stop)
    if code and options.session:
        # What is left of a broken world may wait for those that are gone, even while the interpreter is taken down.
        logging.shutdown()
        os._exit(code)
    # Even if a thread that some library left behind does not end.
    call_later(_EXIT_S, functools.partial(os._exit, code))
    sys.exit(code)


def _parser(role: Role) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m cosmos_core.{role}", allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--name", required=True, help="name of this replica")
    parser.add_argument("--controller", required=True, help="tcp://HOST:PORT of the controller")
    parser.add_argument("--checkpoint", help="checkpoint to start from")
    parser.add_argument("--rank", type=int, default=0, help="place of this process in its replica")
    parser.add_argument("--session", default="", help="random per start; shared by the processes of a replica")
    parser.add_argument("--incarnation", default=uuid.uuid4().hex[:12], help="of this process, never used before")
    return parser


def _supervise(role: Role, main: Callable[[RoleArgs], None], options: argparse.Namespace, stop: threading.Event) -> int:
    """The process's one supervised boundary: whatever is raised ends here, as an exit code."""
    args: RoleArgs | None = None
    try:
        given = {name: value for name, value in vars(options).items() if name != "run"}
        args = RoleArgs(run_dir=options.run, job=load_job(options.run), role=role, stop=stop, **given)
        _LOG.info("%s %s started, incarnation %s, pid %d", role, args.name, args.incarnation, os.getpid())
        main(args)
    except Exception as error:  # noqa: BLE001 - the supervised boundary
        return _on_error(error, args.client if args else None)
    else:
        _LOG.info("%s %s is done", role, args.name)
        return 0
    finally:
        if args and args.client:
            args.client.close()


def _on_error(error: Exception, client: ControlClient | None) -> int:
    refused = client.refused if client is not None and isinstance(error, ReplicaError) else None
    if refused is not None or isinstance(error, ProcessLostError):
        _LOG.error("%s", error)
        return LOST if refused is None else _code_of(refused)
    is_ours, reason = isinstance(error, CosmosError), words_of(error)
    _LOG.error("%s", reason, exc_info=error if not is_ours or os.environ.get("COSMOS_DEBUG") == "1" else None)
    if has_failed(error):
        # An error that is told to the controller ends the run, and others can go on.
        return LOST
    _tell(reason, client, _FLUSH_S)
    return 1


def _tell(reason: str, client: ControlClient | None, timeout_s: float) -> None:
    """Tell the controller why this replica ends, if it can be told."""
    if client is None:
        return
    try:
        client.report(Failed(reason=reason))
    except CosmosError as full:
        _LOG.warning("the controller could not be told: %s", full)
        return
    if not client.flush(timeout_s):
        _LOG.warning("the controller did not confirm the failure within %g s", timeout_s)


def _code_of(refused: Refused) -> int:
    return REFUSED if refused.is_final else LOST


def _end_if_stuck(refused: Refused) -> None:
    """End the process a while after it was refused: whoever hangs is given up for that, and does not notice."""

    def end() -> None:
        _LOG.error("stuck after the controller refused this replica (%s); ending at once", refused.reason)
        os._exit(_code_of(refused))

    call_later(_STUCK_S, end)


def _log_thread_error(problem: threading.ExceptHookArgs) -> None:
    name = problem.thread.name if problem.thread else "a thread"
    _LOG.error("%s failed: %s", name, problem.exc_value, exc_info=problem.exc_value)
