"""Calls something in a process of its own, a fork: this one imports and keeps nothing of what the call does."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from cosmos_core.errors import CosmosError
from cosmos_core.observe.output import console
from cosmos_core.replica.lifetime import die_with_parent
from cosmos_core.run import fork_server
from cosmos_core.run.interrupts import insistent

_Surroundings: TypeAlias = tuple[tuple[str, int] | None, Path, dict[str, str], bool]
"""The fork server, the current folder, the environment, and whether it outlives its terminal, as under `nohup`."""
_LEAVE_S: Final = 5.0
_SILENT_S: Final = 3.0
"""After which people are told what is waited for."""
_MEMORY: Final = "the machine may have run out of memory"
_callers: Final[list[Connection]] = []
"""Who waits for this process, if it is a fork."""


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
    what, earlier = "", signal.getsignal(signal.SIGTERM)
    try:
        if earlier == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _leave)
        while isinstance(refusal := receiver.recv(), str):
            what = refusal
            if what and not receiver.poll(_SILENT_S):
                _say(what)
    except EOFError:
        process.join()
        raise _lost(process.exitcode or 0, what) from None
    finally:
        receiver.close()
        try:
            if process.is_alive():
                process.terminate()
            process.join(_LEAVE_S)
        finally:
            # Also where a second Ctrl-C comes meanwhile: what lets no other thread run answers no signal but this.
            process.kill()
            process.join()
            signal.signal(signal.SIGTERM, earlier)
    if refusal is not None:
        kind, words, trace = refusal
        # As it was, though its class may be made of other arguments.
        raise kind.__new__(kind, words) from RuntimeError(f"in the process that planned:\n{trace}")


@contextlib.contextmanager
def watched(limit_s: float, what: str) -> Iterator[None]:
    """End this process with a traceback where the block lets no thread end it in time; who waits for it says `what`."""
    _tell(what)
    silence = threading.Timer(_SILENT_S, _say, [what])
    if not _callers:
        silence.start()
    faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        silence.cancel()
        _tell("")


def _say(what: str) -> None:
    console().print(f"waiting for {what}", style="dim", markup=False, soft_wrap=True)


def _tell(message: object) -> None:
    for caller in _callers:
        # It may be leaving.
        with contextlib.suppress(BrokenPipeError):
            caller.send(message)


def _started(call: Callable[[], None], method: str, server: tuple[str, int] | None) -> tuple[BaseProcess, Connection]:
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    with sender, fork_server.patience() if server else contextlib.nullcontext():
        is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        surroundings = (server, Path.cwd(), dict(os.environ), is_kept)
        process = context.Process(target=_call, args=(call, sender, surroundings))
        process.start()
    return process, receiver


def _lost(code: int, what: str) -> CosmosError:
    """The error to raise of a process that ended without an answer while it waited for `what`, if anything."""
    at = f"; it waited for {what}, which may have let no other thread run: mend it" if what else ""
    if code == fork_server.UNKNOWN:
        return CosmosError(f"planning ended with its fork server, which was killed; {_MEMORY}")
    if code < 0:
        hint = f"; {_MEMORY}" if code == -signal.SIGKILL else ""
        return CosmosError(f"planning was ended by signal {-code}{hint}{at}")
    return CosmosError(
        f"planning ended without an answer, exit code {code}: by an error whose traceback was printed, or a plugin "
        f"that ends its process (sys.exit, os._exit){at}"
    )


def _call(call: Callable[[], None], sender: Connection, surroundings: _Surroundings) -> None:
    server, folder, environment, is_kept = surroundings
    _callers[:] = [sender]
    fork_server.borrow(server)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_kept else signal.SIG_DFL)
    # Ctrl-C stays ignored: its parent ends it.
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent(signal.SIGTERM)
    threading.Thread(target=_end_with_reader, args=(sender.fileno(),), name="caller", daemon=True).start()
    refusal = None
    try:
        with insistent(SystemExit, signal.SIGTERM):
            call()
    except CosmosError as error:
        refusal = (type(error), str(error), traceback.format_exc())
    _tell(refusal)


def _leave(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _end_with_reader(pipe: int) -> None:
    """End this process once nobody reads from a pipe: its caller has ended, whose fork server takes seconds to."""
    broken = select.poll()
    broken.register(pipe, 0)
    broken.poll()
    os.kill(os.getpid(), signal.SIGTERM)
