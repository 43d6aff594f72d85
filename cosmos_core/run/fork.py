"""Calls something in a fork of this process, which imports and keeps nothing of it."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

from cosmos_core.errors import CosmosError
from cosmos_core.replica.lifetime import die_with_parent
from cosmos_core.run.launch import fork_server

_LEAVE_S: Final = 5.0
_MEMORY: Final = "the system ends processes so that need more memory than there is"


def in_fork(call: Callable[[], None]) -> None:
    """Call something in a fork of this process, and wait for it; a CosmosError of it is raised here.

    Planning imports torch; the memory that this takes, and whatever else the call changes in memory, is gone with the
    fork. The fork ends with this process.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(call, sender))
    process.start()
    sender.close()
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


def _call(call: Callable[[], None], sender: Connection) -> None:
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Ctrl-C is for its parent too, which ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fork_server.borrow()
    try:
        call()
    except CosmosError as error:
        sender.send((type(error), str(error), traceback.format_exc()))
    else:
        sender.send(None)
