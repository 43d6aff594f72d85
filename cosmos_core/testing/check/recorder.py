"""The pytest session of the check, from inside: what came of each test, and which tests of the kit did not run.

`python -m cosmos_core.testing.check.recorder ORDER` takes its order and writes the outcomes as JSON.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs
import msgspec
import pytest

from cosmos_core import testing
from cosmos_core.testing import conformance
from cosmos_core.testing.conformance.plugin import PluginConformance

Result: TypeAlias = Literal["passed", "failed", "skipped", "not run"]

_KITS: Final = Path(conformance.__file__).parent
_LEFT_OUT: Final = "left out by the project's tests; inherit the whole class of the kind, and leave no test out"


@attrs.frozen(kw_only=True)
class Order:
    """The run that is asked for.

    Attributes:
        answer: File for the outcomes.
        arguments: Paths and options for pytest.
        modules: Modules to import from the path as it is before pytest.
        plugins: Kind and name of the plugins whose conformance classes are run; None for every test.
    """

    answer: str
    arguments: Sequence[str]
    modules: Sequence[str]
    plugins: Collection[tuple[str, str]] | None


@attrs.frozen(kw_only=True)
class Outcome:
    """The outcome of one test.

    Attributes:
        node: pytest's id of it.
        kind: Kind of the plugin that its conformance class is for; empty for a test outside the kit.
        plugin: Name of that plugin; empty outside the kit.
        test: Name of the test, parameters included.
        result: How it ended; an error in a fixture is a failure. `not run`: none of the plugin's classes ran that test
            of the kit as it is.
        message: Why it failed, was skipped or did not run.
    """

    node: str
    kind: str
    plugin: str
    test: str
    result: Result
    message: str = ""


class _Remaining:
    """The tests of each plugin's kit that nothing has answered yet, and why not."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], dict[str, str]] = {}

    def expect(self, cls: type[PluginConformance]) -> None:
        """Expect all tests of the kit of the class's kind for its plugin."""
        names = (name for name in dir(_kit_of_kind(cls)) if name.startswith("test_"))
        self._reasons.setdefault(_key(cls), dict.fromkeys(names, _LEFT_OUT))

    def answer(self, item: pytest.Function, cls: type[PluginConformance], unanswered: str) -> None:
        """Take a test off, or say why it still remains."""
        reasons, name = self._reasons[_key(cls)], item.originalname
        if name not in reasons:
            return
        if item.function is not getattr(_kit_of_kind(cls), name):
            reasons[name] = f"{cls.__name__} overrides it, so that the kit's own did not run"
        elif unanswered:
            reasons[name] = unanswered
        else:
            del reasons[name]

    def outcomes(self) -> list[Outcome]:
        """One for each test that remains."""
        return [
            Outcome(node=f"{kind} {plugin}", kind=kind, plugin=plugin, test=name, result="not run", message=reason)
            for (kind, plugin), reasons in self._reasons.items()
            for name, reason in reasons.items()
        ]


class _Recorder:
    """A pytest plugin that keeps what came of each test."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._path = [*sys.path]
        self._outcomes: dict[str, Outcome] = {}
        self._remaining = _Remaining()

    def outcomes(self) -> list[Outcome]:
        """Outcomes of all tests, and the tests of the kits that remain."""
        return [*self._outcomes.values(), *self._remaining.outcomes()]

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config, args: list[str]) -> None:
        """Import what is tested, and drop `addopts`, which may leave tests out or run them elsewhere.

        How the project's own modules are imported stays as it is; what they put on the path takes no plugin's place.
        """
        later, sys.path[:] = [*sys.path], self._path
        for module in self._order.modules:
            importlib.import_module(module)
        sys.path[:] = later
        args[:] = [*self._order.arguments, f"--import-mode={early_config.known_args_namespace.importmode}"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._order.plugins is not None:
            items[:] = [item for item in items if _is_kit_of(_class(item), self._order.plugins)]
        for cls in {_class(item): None for item in items}:
            if cls is not None:
                self._remaining.expect(cls)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            node, message = report.nodeid, str(report.longrepr)
            self._keep(Outcome(node=node, kind="", plugin="", test=node, result="failed", message=message))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report: pytest.TestReport = yield
        if report.when == "call" or not report.passed:
            cls = _class(item)
            kind, plugin = _key(cls) if cls else ("", "")
            result: Result = "failed" if report.failed else "skipped" if report.skipped else "passed"
            message = _message(report)
            self._keep(
                Outcome(node=item.nodeid, kind=kind, plugin=plugin, test=item.name, result=result, message=message)
            )
            if cls is not None and isinstance(item, pytest.Function):
                is_answer = not report.skipped or _is_skipped_by_kit(report, call)
                self._remaining.answer(item, cls, "" if is_answer else f"skipped by the project's tests: {message}")
        return report

    def _keep(self, outcome: Outcome) -> None:
        known = self._outcomes.get(outcome.node)
        if known is None or known.result == "passed":
            self._outcomes[outcome.node] = outcome


def _class(item: pytest.Item) -> type[PluginConformance] | None:
    """The conformance class that a test belongs to."""
    cls = getattr(item, "cls", None)
    return cls if isinstance(cls, type) and issubclass(cls, PluginConformance) else None


def _key(cls: type[PluginConformance]) -> tuple[str, str]:
    """The plugin that a class is for; a class that names none has tests that fail and say so."""
    return cls.kind, getattr(cls, "plugin", "")


def _is_kit_of(cls: type[PluginConformance] | None, plugins: Collection[tuple[str, str]]) -> bool:
    """True if a class is for one of some plugins; one that names no plugin may be for any."""
    if cls is None:
        return False
    kind, plugin = _key(cls)
    return not plugin or (kind, plugin.rpartition(":")[2]) in plugins


def _kit_of_kind(cls: type[PluginConformance]) -> type[PluginConformance]:
    """The whole kit of the kind, of which a class may inherit a part."""
    kit: type[PluginConformance] = getattr(testing, f"{cls.kind.capitalize()}Conformance")
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


def _main() -> int:
    order = msgspec.json.decode(sys.argv[1], type=Order)
    recorder = _Recorder(order)
    code = pytest.main([*order.arguments], plugins=[recorder])
    Path(order.answer).write_bytes(msgspec.json.encode(recorder.outcomes()))
    return int(code)


if __name__ == "__main__":
    sys.exit(_main())
