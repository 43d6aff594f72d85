"""Processes of the check, which import what it judges: the probe, and pytest with the recorder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import attrs
import msgspec
import pytest

from cosmos_core.errors import PluginError
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.testing.check.probe import Loaded
from cosmos_core.testing.check.recorder import Order, Outcome
from cosmos_core.testing.conformance.processes import run

T = TypeVar("T")
_LONGEST_S: Final = 120.0
_LAST_LINES: Final = 12


def python_path(folder: Path) -> dict[str, str]:
    """Variables that put a folder before what is on the path already."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def records_in(folder: Path) -> list[PluginRecord]:
    """The plugins that are found with a folder first on the path."""
    return _ask([], python_path(folder), list[PluginRecord])[0]


def load(record: PluginRecord, environment: Mapping[str, str]) -> Loaded:
    """Import and load a plugin in a fresh process and return what that did; one that dies cannot be imported."""
    try:
        arguments = [record.kind, f"{record.distribution}:{record.name}", record.entry_point.module]
        answer, printed = _ask(arguments, environment, Loaded)
    except PluginError as error:
        return Loaded(unimported=str(error))
    return attrs.evolve(answer, printed=printed)


def _ask(arguments: Sequence[str], environment: Mapping[str, str], answer: type[T]) -> tuple[T, str]:
    """The probe's answer, and what its process printed."""
    with tempfile.TemporaryDirectory(prefix="cosmos-check-") as scratch:
        folder = Path(scratch)
        file = folder / "answer.json"
        probe, given = "cosmos_core.testing.check.probe", [str(file), *arguments]
        code, output = run(probe, given, folder=folder, environment=environment, timeout_s=_LONGEST_S)
        printed = output.strip()
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=answer), printed
    if code is None:
        raise PluginError(f"it did not end in {_LONGEST_S:.0f} s; import nothing that waits or loops")
    last = printed.splitlines()[-1] if printed else "it printed nothing"
    raise PluginError(f"the process ended with exit code {code}: {last}")


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
    variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="cosmos-check-") as scratch:
        answer = Path(scratch) / "outcomes.json"
        options = ["-q", "--no-header", "-o", f"cache_dir={scratch}", *arguments]
        order = msgspec.json.encode(Order(str(answer), options, modules, plugins)).decode()
        recorder = "cosmos_core.testing.check.recorder"
        code, output = run(recorder, [order], folder=folder, environment=variables, timeout_s=timeout_s)
        outcomes = msgspec.json.decode(answer.read_bytes(), type=list[Outcome]) if answer.exists() else None
    tail = "\n".join(output.splitlines()[-_LAST_LINES:])
    if outcomes is None:
        how = (
            f"did not end in {timeout_s:.0f} s; its last lines" if code is None else f"could not run (exit code {code})"
        )
        raise PluginError(f"the kit {how}:\n{tail}")
    is_none_expected = plugins is not None and code == pytest.ExitCode.NO_TESTS_COLLECTED
    if not outcomes and not is_none_expected:
        raise PluginError(f"no test ran (exit code {code}):\n{tail}")
    return outcomes
