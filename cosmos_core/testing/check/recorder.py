"""The pytest session of the check, from inside: what came of each test, and which tests of the kit did not run.

`python -m cosmos_core.testing.check.recorder ORDER ANSWER` reads an order and writes the outcomes, both JSON.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs
import msgspec
import pytest

from cosmos_core import testing
from cosmos_core.errors import PluginError
from cosmos_core.testing import conformance
from cosmos_core.testing.conformance.plugin import PluginConformance
from cosmos_core.testing.conformance.processes import exchange

Result: TypeAlias = Literal["passed", "failed", "skipped", "not run"]
Kit: TypeAlias = type[PluginConformance]

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


@attrs.frozen(kw_only=True)
class _Order:
    """Arguments of `run_pytest` that are for the process that it starts."""

    arguments: Sequence[str]
    modules: Sequence[str]
    plugins: Collection[tuple[str, str]] | None


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
    outcomes, code, output = exchange(
        "cosmos_core.testing.check.recorder",
        _Order(arguments=arguments, modules=modules, plugins=plugins),
        list[Outcome],
        timeout_s=timeout_s,
        environment={"OMP_NUM_THREADS": "1", **(environment or {})},
        folder=folder,
    )
    tail = "\n".join(output.splitlines()[-_LAST_LINES:])
    if outcomes is None and code is None:
        raise PluginError(f"the kit did not end in {timeout_s:.0f} s; its last lines:\n{tail}")
    if outcomes is None:
        raise PluginError(f"the kit could not run (exit code {code}):\n{tail}")
    if not outcomes and (plugins is None or code != pytest.ExitCode.NO_TESTS_COLLECTED):
        raise PluginError(f"no test ran (exit code {code}):\n{tail}")
    return outcomes


class _Recorder:
    """A pytest plugin that keeps what came of each test."""

    def __init__(self, order: _Order, arguments: Sequence[str]) -> None:
        self._order, self._arguments = order, arguments
        self._path = [*sys.path]
        self._outcomes: dict[str, Outcome] = {}
        """By pytest's id of the test."""
        self._unanswered: dict[tuple[str, str], dict[str, str]] = {}
        """Of each plugin, the tests of its kit that nothing has answered yet, and why not."""

    def outcomes(self) -> list[Outcome]:
        """Outcomes of all tests, and the tests of the kits that remain."""
        remaining = [
            Outcome(kind=kind, plugin=plugin, test=name, result="not run", message=reason)
            for (kind, plugin), reasons in self._unanswered.items()
            for name, reason in reasons.items()
        ]
        return [*self._outcomes.values(), *remaining]

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config, args: list[str]) -> None:
        """Import what is tested, and drop `addopts`, which may leave tests out or run them elsewhere.

        How the project's own modules are imported stays as it is; what they put on the path takes no plugin's place.
        """
        later, sys.path[:] = [*sys.path], self._path
        for module in self._order.modules:
            importlib.import_module(module)
        sys.path[:] = later
        args[:] = [*self._arguments, f"--import-mode={early_config.known_args_namespace.importmode}"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._order.plugins is not None:
            items[:] = [item for item in items if _is_kit_of(_class(item), self._order.plugins)]
        for cls in {_class(item): None for item in items}:
            if cls is not None:
                names = (name for name in dir(_kit_of_kind(cls)) if name.startswith("test_"))
                self._unanswered.setdefault(_key(cls), dict.fromkeys(names, _LEFT_OUT))

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
                is_answer = not report.skipped or _is_skipped_by_kit(report, call)
                self._answer(item, cls, "" if is_answer else f"skipped by the project's tests: {message}")
        return report

    def _keep(self, node: str, outcome: Outcome) -> None:
        known = self._outcomes.get(node)
        if known is None or known.result == "passed":
            self._outcomes[node] = outcome

    def _answer(self, item: pytest.Function, cls: Kit, unanswered: str) -> None:
        """Take a test of the kit off those that remain, or say why it still does."""
        reasons, name = self._unanswered[_key(cls)], item.originalname
        if name in reasons and item.function is not getattr(_kit_of_kind(cls), name):
            reasons[name] = f"{cls.__name__} overrides it, so that the kit's own did not run"
        elif name in reasons and unanswered:
            reasons[name] = unanswered
        else:
            reasons.pop(name, None)


def _class(item: pytest.Item) -> Kit | None:
    cls = getattr(item, "cls", None)
    return cls if isinstance(cls, type) and issubclass(cls, PluginConformance) else None


def _key(cls: Kit) -> tuple[str, str]:
    """The plugin that a class is for; a class that names none has tests that fail and say so."""
    return cls.kind, getattr(cls, "plugin", "")


def _is_kit_of(cls: Kit | None, plugins: Collection[tuple[str, str]]) -> bool:
    """True if a class is for one of some plugins; one that names no plugin may be for any."""
    if cls is None:
        return False
    kind, plugin = _key(cls)
    return not plugin or (kind, plugin.rpartition(":")[2]) in plugins


def _kit_of_kind(cls: Kit) -> Kit:
    """The whole kit of the kind, of which a class may inherit a part."""
    kit: Kit = getattr(testing, f"{cls.kind.capitalize()}Conformance")
    return kit


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
    order = msgspec.json.decode(asked.read_bytes(), type=_Order)
    arguments = ["-q", "--no-header", "-o", f"cache_dir={answered.parent}", *order.arguments]
    recorder = _Recorder(order, arguments)
    code = pytest.main([*arguments], plugins=[recorder])
    answered.write_bytes(msgspec.json.encode(recorder.outcomes()))
    sys.exit(code)
