"""A pytest session in a process of its own, and what came of each of its tests."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from cosmos_core.errors import PluginError
from cosmos_core.testing.check.child import Ended, run
from cosmos_core.testing.check.recorder import Order, Outcome

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
