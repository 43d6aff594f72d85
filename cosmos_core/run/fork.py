"""Calls something in a process of its own, a fork: this one imports and keeps nothing of what the call does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from cosmos_core.errors import CosmosError
from cosmos_core.replica.lifetime import die_with_parent
from cosmos_core.run.launch import fork_server

_LEAVE_S: Final = 5.0
_MEMORY: Final = "the system ends processes so that need more memory than there is"


def in_fork(call: Callable[[], None]) -> None:
    """Call something in a fork, and wait for it; a CosmosError of it is raised here.

    Planning imports torch; the memory that this takes, and whatever else the call changes in memory, is gone with the
    fork. It is a fork of the fork server where one runs, whose imports it need not repeat, and of this process
    elsewhere. It ends with this process.
    """
    server = fork_server.place()
    try:
        process, receiver = _started(call, "forkserver" if server else "fork", server)
    except (OSError, EOFError):
        # The fork server could not import something. Here, its error is told.
        process, receiver = _started(call, "fork", None)
    try:
        refusal = receiver.recv()
    except EOFError:
        process.join()
        # Its traceback has been printed.
        if process.exitcode and process.exitcode > 0:
            raise SystemExit(process.exitcode) from None
        raise CosmosError(f"planning was ended by signal {-(process.exitcode or 0)}; {_MEMORY}") from None
    finally:
        receiver.close()
        if process.is_alive():
            process.terminate()
        process.join(_LEAVE_S)
        process.kill()
        process.join()
    if refusal is not None:
        kind, words, trace = refusal
        # As it was, though its class may be made of other arguments.
        raise kind.__new__(kind, words) from RuntimeError(f"in the process that planned:\n{trace}")


def _started(
    call: Callable[[], None], method: str, server: tuple[str, int] | None
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    with sender:
        process = context.Process(target=_call, args=(call, sender, server, Path.cwd(), dict(os.environ)))
        process.start()
    return process, receiver


def _call(
    call: Callable[[], None],
    sender: Connection,
    server: tuple[str, int] | None,
    here: Path,
    environment: dict[str, str],
) -> None:
    die_with_parent(signal.SIGTERM)
    threading.Thread(target=_end_with_reader, args=(sender.fileno(),), name="caller", daemon=True).start()
    os.chdir(here)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Ctrl-C is for its parent too, which ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fork_server.borrow(server)
    refusal = None
    try:
        call()
    except CosmosError as error:
        refusal = (type(error), str(error), traceback.format_exc())
    # Its caller may be leaving.
    with contextlib.suppress(BrokenPipeError):
        sender.send(refusal)


def _end_with_reader(pipe: int) -> None:
    """End this process once nobody reads from a pipe: its caller has ended, whose fork server takes seconds to."""
    broken = select.poll()
    broken.register(pipe, 0)
    broken.poll()
    os.kill(os.getpid(), signal.SIGTERM)
