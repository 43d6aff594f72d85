"""A process of the check: what it printed is kept, what it leaves running ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import attrs
import msgspec
import pytest

from cosmos_core.errors import PluginError
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.testing.check.probe import Import, Loaded
from cosmos_core.testing.check.recorder import Order, Outcome


@attrs.frozen
class Ended:
    """The end of a process.

    Attributes:
        code: Its exit code; None if it had to be stopped.
        output: What it wrote to standard output and error.
    """

    code: int | None
    output: str


def run(
    module: str, arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], timeout_s: float
) -> Ended:
    """Run a module of the core in a process of its own.

    Args:
        module: Its full name.
        arguments: What it is given.
        folder: Where it runs; modules there are not on its path.
        environment: Variables to set beside those of this process.
        timeout_s: Longest time that it may take.
    """
    command = [sys.executable, "-P", "-u", "-m", module, *arguments]
    # A file, because a pipe stays open for as long as any process that inherited it.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ended(code, output.read().decode(errors="replace"))


T = TypeVar("T")

_LONGEST_S: Final = 120.0
_MODELLING: Final = ("torch", "transformers", "cosmos_core.models")
"""What models and engines build on: its import is not theirs to answer for."""


def records_in(folder: Path) -> list[PluginRecord]:
    """The plugins that are found with a folder first on the path."""
    return _ask("records", python_path(folder), list[PluginRecord])[0]


def ask_import(record: PluginRecord, environment: Mapping[str, str]) -> Import:
    """Import a plugin in a fresh process and return what that did.

    Raises:
        PluginError: The process died, or did not end.
    """
    before = _MODELLING if record.kind in ("model", "engine") else ()
    answer, printed = _ask("import", environment, Import, record.entry_point.module, *before)
    return attrs.evolve(answer, printed=printed)


def ask_load(record: PluginRecord, environment: Mapping[str, str]) -> Loaded:
    """Load a plugin in a fresh process and return what it is.

    Raises:
        PluginError: The process died, or did not end.
    """
    return _ask("load", environment, Loaded, record.kind, f"{record.distribution}:{record.name}")[0]


def python_path(folder: Path) -> dict[str, str]:
    """Variables that put a folder before what is on the path already."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _ask(question: str, environment: Mapping[str, str], answer: type[T], *arguments: str) -> tuple[T, str]:
    """The answer, and what the process printed."""
    with tempfile.TemporaryDirectory(prefix="cosmos-check-") as scratch:
        file = Path(scratch) / "answer.json"
        ended = run(
            "cosmos_core.testing.check.probe",
            [question, str(file), *arguments],
            folder=Path(scratch),
            environment=environment,
            timeout_s=_LONGEST_S,
        )
        printed = ended.output.strip()
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=answer), printed
        if ended.code is None:
            raise PluginError(f"it did not end in {_LONGEST_S:.0f} s; import nothing that waits or loops")
        last = printed.splitlines()[-1] if printed else "it printed nothing"
        raise PluginError(f"the process ended with exit code {ended.code}: {last}")


_QUIET: Final = ("-q", "--no-header", "-o")
_LAST_LINES: Final = 12


def run_pytest(
    arguments: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
    plugins: Collection[tuple[str, str]] | None = None,
) -> list[Outcome]:
    """Run pytest in a new process, as the folder configures it but for its `addopts`.

    Args:
        arguments: Paths and options for pytest.
        folder: Where to run it.
        timeout_s: Longest time that it may take.
        environment: Variables to set beside those of this process.
        modules: Modules to import from the path as it is before pytest.
        plugins: Kind and name of plugins: run the tests of their conformance classes only; there may be none. Runs
            every test if None.

    Raises:
        PluginError: It could not run, collected nothing, or took too long; the message ends with its output.
    """
    with tempfile.TemporaryDirectory(prefix="cosmos-check-") as scratch:
        answer = Path(scratch) / "outcomes.json"
        order = Order(
            answer=str(answer),
            modules=modules,
            plugins=plugins,
            arguments=[*_QUIET, f"cache_dir={scratch}", *arguments],
        )
        ended = run(
            "cosmos_core.testing.check.recorder",
            [msgspec.json.encode(order).decode()],
            folder=folder,
            environment={"OMP_NUM_THREADS": "1", **(environment or {})},
            timeout_s=timeout_s,
        )
        if not answer.exists():
            raise PluginError(_unanswered(ended, timeout_s))
        outcomes = msgspec.json.decode(answer.read_bytes(), type=list[Outcome])
        is_none_expected = plugins is not None and ended.code == pytest.ExitCode.NO_TESTS_COLLECTED
        if not outcomes and not is_none_expected:
            raise PluginError(f"no test ran (exit code {ended.code}):\n{_tail(ended)}")
        return outcomes


def _unanswered(ended: Ended, timeout_s: float) -> str:
    if ended.code is None:
        return f"the kit did not end in {timeout_s:.0f} s; its last lines:\n{_tail(ended)}"
    return f"the kit could not run (exit code {ended.code}):\n{_tail(ended)}"


def _tail(ended: Ended) -> str:
    return "\n".join(ended.output.splitlines()[-_LAST_LINES:])
