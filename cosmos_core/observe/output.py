"""Standard output that may go away while a command goes on."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_COLUMNS: Final = 160


class Output:
    """A stream to a terminal or a pipe. When nobody reads it any more, what is written is lost, and nothing fails.

    Args:
        stream: Has a file descriptor; all else that is asked of it is passed on.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: Final = stream

    def write(self, text: str) -> int:
        """Write; the characters of `text`."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._let_go(error)
        return len(text)

    def flush(self) -> None:
        """Write what was kept back."""
        try:
            self._stream.flush()
        except OSError as error:
            self._let_go(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _let_go(self, error: OSError) -> None:
        """Write to nowhere from now on: also what the stream has kept back, which the interpreter flushes at last."""
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def console() -> Console:
    """Standard output for people; what goes to a file or a pipe is not folded to 80 columns that are not there."""
    from rich.console import Console  # noqa: PLC0415 - commands that print nothing start sooner

    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=cast("TextIO", Output(sys.stdout)), width=None if has_width else _PIPE_COLUMNS)
