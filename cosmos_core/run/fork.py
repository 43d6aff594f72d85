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
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TypeAlias

from cosmos_core.errors import CosmosError
from cosmos_core.replica.lifetime import die_with_parent
from cosmos_core.run import fork_server
from cosmos_core.run.interrupts import insistent

_Surroundings: TypeAlias = tuple[tuple[str, int] | None, Path, dict[str, str], bool]
"""The fork server, the current folder, the environment, and whether it outlives its terminal, as under `nohup`."""
_LEAVE_S: Final = 5.0
_MEMORY: Final = "the machine may have run out of memory"


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
        # The fork server could not import something, and its error is told here; or it did not answer.
        process, receiver = _started(call, "fork", None)
    try:
        refusal = receiver.recv()
    except EOFError:
        process.join()
        raise _lost(process.exitcode or 0) from None
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


def _started(call: Callable[[], None], method: str, server: tuple[str, int] | None) -> tuple[BaseProcess, Connection]:
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    with sender, fork_server.patience() if server else contextlib.nullcontext():
        is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        surroundings = (server, Path.cwd(), dict(os.environ), is_kept)
        process = context.Process(target=_call, args=(call, sender, surroundings))
        process.start()
    return process, receiver


def _lost(code: int) -> CosmosError:
    """The error to raise of a process that ended without an answer."""
    if code == fork_server.UNKNOWN:
        return CosmosError(f"planning ended with its fork server, which was killed; {_MEMORY}")
    if code < 0:
        hint = f"; {_MEMORY}" if code == -signal.SIGKILL else ""
        return CosmosError(f"planning was ended by signal {-code}{hint}")
    return CosmosError(
        f"planning ended without an answer, exit code {code}: by an error whose traceback was printed, or a plugin "
        "that ends its process (sys.exit)"
    )


def _call(call: Callable[[], None], sender: Connection, surroundings: _Surroundings) -> None:
    server, folder, environment, is_kept = surroundings
    fork_server.borrow(server)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_kept else signal.SIG_DFL)
    # Ctrl-C stays ignored: its parent ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    die_with_parent(signal.SIGTERM)
    threading.Thread(target=_end_with_reader, args=(sender.fileno(),), name="caller", daemon=True).start()
    refusal = None
    try:
        with insistent(SystemExit, signal.SIGTERM):
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
