"""`python -m cosmos_core.control --run RUN_DIR [--resume-step N] [--port PORT]`: the controller's process.

Started again, it goes on where its journal ends; at the port that it had, its replicas find it.

Exit codes: 0 when the run finished or was stopped, and everyone was told; 1 when it failed; 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import zmq

from cosmos_core.config.fingerprint import facts_of
from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job
from cosmos_core.control.journal import Journal
from cosmos_core.control.live.figures import Timeline
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import Resumed, RunOpened
from cosmos_core.control.machine.settings import settings_of
from cosmos_core.control.machine.state import State
from cosmos_core.control.page.window import opened
from cosmos_core.control.recovery_snapshots import RecoverySnapshots, require_known
from cosmos_core.control.server import Server
from cosmos_core.control.write_ahead_log import begin_term
from cosmos_core.errors import CosmosError, JournalError
from cosmos_core.files import replace_file
from cosmos_core.observe import logs
from cosmos_core.plugins.recipe import plugin_versions
from cosmos_core.protocols.provider import KINDS
from cosmos_core.replica.lifetime import bounded_life
from cosmos_core.transport import key_folder, sockets
from cosmos_core.transport.addresses import host_id
from cosmos_core.transport.authentication import Listener, listen
from cosmos_core.transport.bounds import REPORT_BYTES
from cosmos_core.transport.key_folder import AllowList
from cosmos_core.transport.keys import ALLOWED, controller_key

_LOG: Final = logging.getLogger(__name__)
_LINGER_MS: Final = 2000
_LIMITS: Final = attrs.evolve(sockets.CONTROL, part_bytes=2 * REPORT_BYTES)
"""Of what it receives: reports in batches of 1 MiB, or one that is larger."""
_TERMINATED: Final = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run the controller; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cosmos_core.control", allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--resume-step", type=int, help="go on from the checkpoint of this step")
    parser.add_argument("--port", type=int, help="where to listen, instead of control.port")
    options = parser.parse_args(argv)
    logs.setup(options.run / "logs" / "controller.jsonl", "controller")
    stop = threading.Event()
    with bounded_life(stop):
        try:
            return _serve(load_job(options.run), options.resume_step, options.port, stop)
        except CosmosError as error:
            _LOG.error("%s", error, exc_info=error if os.environ.get("COSMOS_DEBUG") == "1" else None)
        except Exception:  # noqa: BLE001 - the supervised boundary
            _LOG.exception("the controller failed")
        return 1


def _serve(job: Job, resume_step: int | None, port: int | None, stop: threading.Event) -> int:
    control = job.recipe.control
    with zmq.Context() as context, Journal(job.journal, durable=control.durable) as journal, opened(job) as page:
        state, timeline = restore(journal, job, resume_step)
        if page.window is not None:
            page.window.go_on_from(timeline)
        snapshots = RecoverySnapshots(job.recovery_snapshots, keep=job.recipe.policy.checkpoint.keep)
        facts = facts_of(job.recipe, plugin_versions(job.recipe, KINDS))
        # Not before: whoever connects is a stranger until it is heard, and a long journal takes a while to fold.
        listener = _listen(job, context, control.port if port is None else port)
        try:
            _announce(job, sockets.address_of(listener.socket), state.term, page.announcement)
            server = Server(state, journal, listener, control, snapshots, window=page.window, facts=facts)
            has_ended = server.run(stop)
        finally:
            listener.close(linger_ms=_LINGER_MS)
    if not has_ended:
        return _TERMINATED
    _LOG.log(logging.ERROR if state.outcome == "failed" else logging.INFO, "run %s %s", state.outcome, state.reason)
    return 0 if state.outcome in ("finished", "stopped") else 1


def _listen(job: Job, context: sockets.Context, port: int) -> Listener:
    """Listen for those who have keys; a run that brings none makes its own."""
    if job.recipe.control.keys is None:
        key_folder.ensure(job.keys)
    own, allowed = controller_key(job.keys).pair, AllowList(job.keys / ALLOWED)
    return listen(context, job.recipe.control.bind, port, _LIMITS, own=own, allowed=allowed)


def restore(journal: Journal, job: Job, resume_step: int | None) -> tuple[State, Timeline]:
    """Fold the journal, opening or resuming the run, and begin a new term; all of it is settled on return.

    Returns the run's state, and when it came to that; a JournalError says why the run cannot go on, and how it can.
    """
    settings = settings_of(job)
    timeline = Timeline()
    if journal.last:
        state = _folded(journal, timeline)
        if state.settings.run_id != settings.run_id:
            raise JournalError(
                f"{job.journal} is of run {state.settings.run_id}, but the job is run {settings.run_id}; "
                "choose another run.name, or resume that run"
            )
        require_known(job.recovery_snapshots, state)
        if resume_step is None and state.has_ended:
            raise JournalError(f"{job.journal}: the run has ended ({state.outcome}); go on with --resume")
    else:
        require_known(job.recovery_snapshots, None)
        opening = RunOpened(settings=settings)
        journal.append(opening)
        state = core.begin(opening)
    if resume_step is not None:
        resumed = Resumed(step=resume_step, settings=settings)
        core.step(state, resumed)
        timeline.take(time.time(), resumed, state)
        journal.append(resumed)
    timeline.take(time.time(), begin_term(state, journal), state)
    return state, timeline


def _folded(journal: Journal, timeline: Timeline) -> State:
    state: State | None = None
    for when, event in journal.timed():
        state = core.fold((event,), state)
        timeline.take(when, event, state)
    assert state is not None, "the journal has entries"
    return state


def _announce(job: Job, address: str, term: int, more: Mapping[str, str]) -> None:
    found = {"address": address, "pid": os.getpid(), "host": host_id(), "term": term, **more}
    replace_file(job.directory / "controller.json", f"{json.dumps(found)}\n".encode())
    _LOG.info("listening on %s, term %d", address, term)


if __name__ == "__main__":
    sys.exit(main())
