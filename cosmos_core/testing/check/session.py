"""A pytest session in a process of its own, and what came of each of its tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs
import msgspec
import pytest

from cosmos_core.errors import PluginError
from cosmos_core.testing.conformance.plugin import PluginConformance

Result: TypeAlias = Literal["passed", "failed", "skipped"]

_EVERYTHING: Final = "everything"
_ONLY_KITS: Final = "only-kits"
_QUIET: Final = ("-q", "--no-header", "-p", "no:cacheprovider", "--import-mode=importlib")


@attrs.frozen(kw_only=True)
class Outcome:
    """What came of one test.

    Attributes:
        node: pytest's id of it.
        kind: Kind of the plugin that its conformance class is for; empty for a test outside the kit.
        plugin: Name of that plugin; empty outside the kit.
        test: Name of the test, parameters included.
        result: How it ended; an error in a fixture is a failure.
        message: Why it failed or was skipped.
    """

    node: str
    kind: str
    plugin: str
    test: str
    result: Result
    message: str = ""


def run_pytest(
    arguments: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    only_kits: bool = False,
) -> list[Outcome]:
    """Run pytest in a new process.

    Args:
        arguments: Paths and options for pytest.
        folder: Where to run it.
        timeout_s: Longest time that it may take.
        environment: Variables to set beside those of this process.
        only_kits: Run the tests of conformance classes only; there may be none.

    Raises:
        PluginError: It could not run, collected nothing, or took too long; the message ends with its output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "outcomes.json"
        scope = _ONLY_KITS if only_kits else _EVERYTHING
        command = [
            sys.executable,
            "-P",
            "-m",
            "cosmos_core.testing.check.session",
            str(answer),
            scope,
            *_QUIET,
            *arguments,
        ]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        try:
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            raise PluginError(f"the kit did not end in {timeout_s:.0f} s; its last lines:\n{_tail(output)}") from error
        if not answer.exists():
            raise PluginError(
                f"the kit could not run (exit code {done.returncode}):\n{_tail(done.stdout + done.stderr)}"
            )
        outcomes = msgspec.json.decode(answer.read_bytes(), type=list[Outcome])
        is_none_expected = only_kits and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
        if not outcomes and not is_none_expected:
            raise PluginError(f"no test ran (exit code {done.returncode}):\n{_tail(done.stdout + done.stderr)}")
        return outcomes


class _Recorder:
    """A pytest plugin that keeps what came of each test."""

    def __init__(self, *, only_kits: bool) -> None:
        self.only_kits = only_kits
        self.outcomes: dict[str, Outcome] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.only_kits:
            items[:] = [item for item in items if _kit(item) is not None]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._keep(
                Outcome(
                    node=report.nodeid,
                    kind="",
                    plugin="",
                    test=report.nodeid,
                    result="failed",
                    message=str(report.longrepr),
                )
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report: pytest.TestReport = yield
        if report.when == "call" or not report.passed:
            kit = _kit(item)
            self._keep(
                Outcome(
                    node=item.nodeid,
                    kind=kit.kind if kit else "",
                    plugin=kit.plugin if kit else "",
                    test=item.name,
                    result="failed" if report.failed else "skipped" if report.skipped else "passed",
                    message=_message(report),
                )
            )
        return report

    def _keep(self, outcome: Outcome) -> None:
        known = self.outcomes.get(outcome.node)
        if known is None or known.result == "passed":
            self.outcomes[outcome.node] = outcome


def _kit(item: pytest.Item) -> type[PluginConformance] | None:
    """The conformance class that a test belongs to."""
    cls = getattr(item, "cls", None)
    return cls if isinstance(cls, type) and issubclass(cls, PluginConformance) else None


def _message(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr or "").removeprefix("Failed: ")


def _tail(*texts: str, lines: int = 30) -> str:
    return "\n".join("".join(texts).splitlines()[-lines:])


def _main() -> int:
    answer, scope, *arguments = sys.argv[1:]
    recorder = _Recorder(only_kits=scope == _ONLY_KITS)
    code = pytest.main(arguments, plugins=[recorder])
    Path(answer).write_bytes(msgspec.json.encode(list(recorder.outcomes.values())))
    return int(code)


if __name__ == "__main__":
    sys.exit(_main())
