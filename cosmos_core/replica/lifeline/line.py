"""What every end of a lifeline has, and all there is of one in a replica of one process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from cosmos_core.errors import CosmosError, ProcessLostError, ReplicaError
from cosmos_core.replica.exits import LOST
from cosmos_core.replica.wire import End, Failure

LEADER: Final = 0
PATIENCE_S: Final = 15.0
GOODBYE_S: Final = 120.0
"""How long processes may differ in the end of their work."""
ANSWER_S: Final = 1.0
"""How long the other end may take to answer."""
PAUSE_S: Final = 4.0
"""Between two looks, this process did not run: it has no right to call others silent."""
_FAREWELL_S: Final = 1.5

Ender = Callable[[ReplicaError], None]
"""Ends this process because of an error; does not return."""


class Lifeline:
    """That of a replica of one process: there is nobody to lose.

    Attributes:
        abandoned: Newest generation that the leader no longer waits for.
    """

    def __init__(self) -> None:
        self.abandoned = -1
        self._cause: End | None = None

    def abandon(self, generation: int) -> None:
        """Let the followers stop waiting for the gradient group of a generation."""

    def goodbye(self) -> None:
        """Return once every process has done its work."""

    def fail(self, failure: Failure) -> End:
        """Tell the others; what ends the replica: this failure, or the one that it is the echo of."""
        return End(reason=failure.reason)

    @property
    def rank(self) -> int:
        """This process's place in the replica."""
        return LEADER

    def _end_soon(self) -> None:
        """End the process even if what is left of it waits for others."""
        timer = threading.Timer(_FAREWELL_S, self._leave)
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        os._exit(LOST if self._cause is not None and self._cause.is_loss else 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.goodbye()
        elif isinstance(error, Exception):
            own = _failure_of(error, self.rank)
            cause = self.fail(own)
            if cause.reason != own.reason:
                raise error_of(cause) from error


def error_of(cause: End) -> ReplicaError:
    """What ends a process, as an error."""
    return ProcessLostError(cause.reason) if cause.is_loss else ReplicaError(cause.reason)


def words_of(error: BaseException) -> str:
    """An error in words; of a RuntimeError from another error, which torch's pipelines raise, those of the other."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) if isinstance(error, CosmosError) else f"{type(error).__name__}: {error}"


def _failure_of(error: Exception, rank: int) -> Failure:
    """An error of `torch.distributed`, which is a RuntimeError, may be no more than another process's end."""
    chain = [error, *filter(None, [error.__cause__])]
    return Failure(
        rank=rank,
        reason=words_of(error),
        time=time.time(),
        is_echo=any(isinstance(each, RuntimeError) for each in chain),
    )
