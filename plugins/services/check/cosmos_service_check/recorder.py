"""The pytest session of the check, from inside: what came of each test, and which tests of the kit did not run.

`python -m cosmos_service_check.recorder ORDER ANSWER` reads `[modules, plugins]` of `run_pytest` and writes the
outcomes, both JSON.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs
import msgspec
import pytest

from cosmos_core import testing
from cosmos_core.errors import PluginError
from cosmos_core.testing import conformance, kit_of
from cosmos_core.testing.conformance.plugin import PluginConformance
from cosmos_core.testing.conformance.processes import exchange

Result: TypeAlias = Literal["passed", "failed", "skipped", "not run"]
Kit: TypeAlias = type[PluginConformance]
Plugins: TypeAlias = Collection[tuple[str, str]] | None

_KITS: Final = Path(conformance.__file__).parent
_LAST_LINES: Final = 12
_LEFT_OUT: Final = "left out by the project's tests; inherit the whole class of the kind, and leave no test out"


@attrs.frozen(kw_only=True)
class Outcome:
    """The outcome of one test.

    Attributes:
        kind: Kind of the plugin that its conformance class is for; empty for a test outside the kit.
        plugin: Name of that plugin; empty outside the kit.
        test: Name of the test, parameters included.
        result: How it ended; an error in a fixture is a failure. `not run`: none of the plugin's classes ran that test
            of the kit as it is.
        message: Why it failed, was skipped or did not run.
    """

    kind: str = ""
    plugin: str = ""
    test: str
    result: Result
    message: str = ""


def run_pytest(
    folder: Path,
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    modules: Sequence[str] = (),
    plugins: Plugins = None,
) -> list[Outcome]:
    """Run pytest in a new process, as the folder configures it but for its `addopts`.

    Args:
        folder: Where to run it.
        timeout_s: Longest time that it may take.
        environment: Variables to set beside those of this process.
        modules: Modules to import from the path as it is before pytest.
        plugins: Kind and name of plugins: run the tests of their conformance classes only; there may be none. Runs
            every test if None.

    Raises:
        PluginError: It could not run, collected nothing, or took too long; the message ends with its output.
    """
    outcomes, code, output = exchange(
        "cosmos_service_check.recorder",
        (modules, plugins),
        list[Outcome],
        timeout_s=timeout_s,
        environment={"OMP_NUM_THREADS": "1", **environment},
        folder=folder,
    )
    tail = "\n".join(output.splitlines()[-_LAST_LINES:])
    if outcomes is None:
        what = f"did not end in {timeout_s:.0f} s" if code is None else f"could not run (exit code {code})"
        raise PluginError(f"the kit {what}; its last lines:\n{tail}")
    if not outcomes and (plugins is None or code != pytest.ExitCode.NO_TESTS_COLLECTED):
        raise PluginError(f"no test ran (exit code {code}):\n{tail}")
    return outcomes


class _Recorder:
    """A pytest plugin that keeps what came of each test."""

    def __init__(self, modules: Sequence[str], plugins: Plugins, arguments: Sequence[str]) -> None:
        self._modules, self._plugins, self._arguments = modules, plugins, arguments
        self._path = [*sys.path]
        self._outcomes: dict[str, Outcome] = {}
        """By pytest's id of the test."""
        self._kits: dict[tuple[str, str], Kit] = {}
        """The whole kit of each plugin that has a class."""
        self._gaps: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
        """Of each plugin and test of its kit, why each run of it is no answer; an empty text for one that is."""

    def outcomes(self) -> list[Outcome]:
        """Outcomes of all tests, and the tests of the kits that nothing has answered."""
        remaining = [
            Outcome(kind=kind, plugin=plugin, test=name, result="not run", message=gaps[-1])
            for (kind, plugin), kit in self._kits.items()
            for name in dir(kit)
            if name.startswith("test_") and "" not in (gaps := self._gaps.get((kind, plugin, name), [_LEFT_OUT]))
        ]
        return [*self._outcomes.values(), *remaining]

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config, args: list[str]) -> None:
        """Import what is tested, and drop `addopts`, which may leave tests out or run them elsewhere.

        How the project's own modules are imported stays as it is; what they put on the path takes no plugin's place.
        """
        later, sys.path[:] = [*sys.path], self._path
        for module in self._modules:
            importlib.import_module(module)
        sys.path[:] = later
        args[:] = [*self._arguments, f"--import-mode={early_config.known_args_namespace.importmode}"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._plugins is not None:
            items[:] = [item for item in items if _is_kit_of(_class(item), self._plugins)]
        for cls in filter(None, map(_class, items)):
            self._kits[_key(cls)] = _kit(cls)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            outcome = Outcome(test=report.nodeid, result="failed", message=str(report.longrepr))
            self._keep(report.nodeid, outcome)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report: pytest.TestReport = yield
        if report.when == "call" or not report.passed:
            cls, message = _class(item), _message(report)
            kind, plugin = _key(cls) if cls else ("", "")
            outcome = Outcome(kind=kind, plugin=plugin, test=item.name, result=report.outcome, message=message)
            self._keep(item.nodeid, outcome)
            if cls is not None and isinstance(item, pytest.Function):
                name, gap = item.originalname, ""
                if item.function is not getattr(self._kits[kind, plugin], name, None):
                    gap = f"{cls.__name__} overrides it, so that the kit's own did not run"
                elif report.skipped and not _is_skipped_by_kit(report, call):
                    gap = f"skipped by the project's tests: {message}"
                self._gaps[kind, plugin, name].append(gap)
        return report

    def _keep(self, node: str, outcome: Outcome) -> None:
        known = self._outcomes.get(node)
        if known is None or known.result == "passed":
            self._outcomes[node] = outcome


def _class(item: pytest.Item) -> Kit | None:
    cls = getattr(item, "cls", None)
    return cls if isinstance(cls, type) and issubclass(cls, PluginConformance) else None


def _key(cls: Kit) -> tuple[str, str]:
    """The plugin that a class is for; a class that names none has tests that fail and say so."""
    return cls.kind, getattr(cls, "plugin", "")


def _kit(cls: Kit) -> Kit:
    """The whole kit that a class inherits, such as that of agents; its kind's where it has only parts of one."""
    ours = (each for each in cls.__mro__ if each.__module__.startswith(conformance.__name__))
    whole = [each.__name__ for each in ours if each.__name__ in testing.__all__]
    kit: Kit = getattr(testing, whole[0] if whole else kit_of(cls.kind))
    return kit


def _is_kit_of(cls: Kit | None, plugins: Collection[tuple[str, str]]) -> bool:
    """True if a class is for one of some plugins; one that names no plugin may be for any."""
    if cls is None:
        return False
    kind, plugin = _key(cls)
    return not plugin or (kind, plugin.rpartition(":")[2]) in plugins


def _is_skipped_by_kit(report: pytest.TestReport, call: pytest.CallInfo[None]) -> bool:
    """True if the kit itself found that a test does not apply, and not a mark, a fixture or an expected failure."""
    if call.excinfo is None or hasattr(report, "wasxfail"):
        return False
    raised = call.excinfo.traceback.filter(call.excinfo)
    return bool(raised) and Path(raised[-1].path).is_relative_to(_KITS)


def _message(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr or "").removeprefix("Failed: ")


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    modules, plugins = msgspec.json.decode(asked.read_bytes(), type=tuple[list[str], list[tuple[str, str]] | None])
    arguments = ["-q", "--no-header", "-o", f"cache_dir={answered.parent}"]
    recorder = _Recorder(modules, plugins, arguments)
    code = pytest.main([*arguments], plugins=[recorder])
    answered.write_bytes(msgspec.json.encode(recorder.outcomes()))
    sys.exit(code)
