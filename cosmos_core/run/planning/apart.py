"""Plans in a process of its own, so that torch is gone with it: who supervises a run does without for as long."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

from cosmos_core.errors import CosmosError
from cosmos_core.replica.lifetime import die_with_parent
from cosmos_core.run.launch import fork_server

_MEMORY: Final = "the system ends processes so that need more memory than there is"


def in_fork(call: Callable[[], None]) -> None:
    """Call something in a fork of this process, and wait for it; a CosmosError of it is raised here.

    What it changes in memory is gone with the fork, which ends with this process.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(call, sender))
    process.start()
    sender.close()
    try:
        error = receiver.recv()
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
        process.join()
    if error is not None:
        raise error


def _call(call: Callable[[], None], sender: Connection) -> None:
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fork_server.borrow()
    try:
        call()
    except CosmosError as error:
        sender.send(error)
    else:
        sender.send(None)
