"""A process beside this one that does a run, or plans it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from cosmos_core import errors
from cosmos_core.api.child import REFUSAL
from cosmos_core.errors import CosmosError

LOOK_S: Final = 0.5
"""Between two looks at a run."""
_LOG: Final = "console.log"
_STOPPED: Final = frozenset({130, -signal.SIGINT, -signal.SIGTERM})


def in_python(words: str) -> str:
    """A refusal of the command line with the arguments of `train` in the place of its options."""
    words = re.sub(r"--set ([\w.]+)=", lambda found: f"{found[1].replace('.', '__')}=", words)
    return words.replace("--overwrite", "overwrite=True").replace("--name", "run__name")


class Child:
    """A process of `cosmos_core.api.child`, with its order and, in a notebook, its output in a temporary folder."""

    def __init__(self, order: Mapping[str, Any], stack: contextlib.ExitStack, place: Path) -> None:
        """Start it with an order; `stack` holds the folder `place`, and is closed at the end."""
        # In the process of a notebook what a child prints would not be seen.
        self.is_quiet: Final = "ipykernel" in sys.modules
        self._stack: Final = stack
        self._place: Final = place
        file = place / "order.json"
        file.write_text(json.dumps(order), encoding="utf-8")
        output = stack.enter_context((place / _LOG).open("wb")) if self.is_quiet else None
        # Without a kernel's demand that whatever is printed be coloured, as on a terminal.
        plain = {name: value for name, value in os.environ.items() if name not in {"FORCE_COLOR", "CLICOLOR_FORCE"}}
        # Ctrl-C is this process's to pass on: once, however many processes the terminal would send it to.
        self._process: Final = subprocess.Popen(
            [sys.executable, "-P", "-m", "cosmos_core.api.child", str(file)],
            stdin=subprocess.PIPE,  # never written to: it ends with this process
            stdout=output,
            stderr=subprocess.STDOUT if self.is_quiet else None,
            start_new_session=True,
            env=plain if self.is_quiet else None,
        )
        atexit.register(self.wait)

    @property
    def has_ended(self) -> bool:
        """True once its process has ended."""
        return self._process.poll() is not None

    def output(self) -> str:
        """The text that it has printed so far; empty where it prints to the terminal."""
        return (self._place / _LOG).read_text(encoding="utf-8", errors="replace") if self.is_quiet else ""

    def interrupt(self) -> None:
        """Stop the run at the next step, with a checkpoint; a second time, at once."""
        self._process.terminate()

    def wait(self, show: Callable[[], None] = lambda: None) -> bool:
        """Wait for its end, calling `show` twice a second; true if a stop has ended it.

        Raises:
            CosmosError: It was refused, as the command line would say.
            KeyboardInterrupt: Ctrl-C came, which interrupted the run first.
        """
        is_interrupted = False
        while not self.has_ended:
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(LOOK_S)
                show()
            except KeyboardInterrupt:
                is_interrupted = True
                self.interrupt()
        atexit.unregister(self.wait)
        assert self._process.stdin is not None, "it was opened"
        self._process.stdin.close()
        show()
        refusal = self._place / REFUSAL
        told = json.loads(refusal.read_text(encoding="utf-8")) if refusal.exists() else None
        printed = self.output()
        self._stack.close()
        if told is not None:
            kind: type[CosmosError] = getattr(errors, told["kind"], CosmosError)
            raise kind.__new__(kind, in_python(told["words"]))
        sys.stdout.write(printed)
        if self._process.returncode not in {0, *_STOPPED}:
            raise CosmosError(f"the run's process ended with exit code {self._process.returncode}; see what it printed")
        if is_interrupted:
            raise KeyboardInterrupt
        return self._process.returncode in _STOPPED
