"""The conformance kit of a plugin: its project's own classes, or, where they are not at hand, one made on the spot."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.plugin.discovery import PluginRecord
from cosmos_core.testing.check.probe import Loaded
from cosmos_core.testing.check.session import Outcome, run_pytest
from cosmos_core.testing.check.subject import Subject
from cosmos_core.testing.check.verdict import Check, Finding
from cosmos_core.types import JSON

_LONGEST_S: Final = 900.0
_NO_CLASS: Final = ""
"""The plugin of an outcome outside of the conformance classes: a module that cannot be collected."""


@attrs.frozen(kw_only=True)
class Given:
    """What the user gives the kit to test with.

    Attributes:
        options: The plugin's options.
        config: A small Hugging Face config, for a model.
        path: Folder of a checkpoint, for a model.
    """

    options: Mapping[str, JSON] = attrs.field(factory=dict)
    config: Mapping[str, JSON] = attrs.field(factory=dict)
    path: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was given."""
        return not (self.options or self.config or self.path)


def run_own(subject: Subject, tests: Path) -> list[Outcome]:
    """Run the conformance classes in a project's tests.

    Raises:
        PluginError: pytest could not run, or took too long.
    """
    modules = [file for file in sorted(tests.rglob("test_*.py")) if "Conformance" in file.read_text(errors="replace")]
    arguments = [str(each) for each in modules or [tests]]
    return run_pytest(
        arguments, folder=tests.parent, timeout_s=_LONGEST_S, environment=subject.environment, only_kits=True
    )


def run_generic(subject: Subject, records: Sequence[PluginRecord], given: Given) -> list[Outcome]:
    """Run a conformance class for each plugin, made on the spot.

    Raises:
        PluginError: pytest could not run, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="cosmos-check-") as scratch:
        folder = Path(scratch)
        source = "\n".join(["import pytest", *(_class(record, given) for record in records)])
        (folder / "test_conformance.py").write_text(source)
        return run_pytest(["test_conformance.py"], folder=folder, timeout_s=_LONGEST_S, environment=subject.environment)


def gap(record: PluginRecord, loaded: Loaded, given: Given) -> str:
    """Why a class made on the spot cannot do, and what to do; empty if it can."""
    elsewhere = "check the project's folder, whose tests say what to test with, or give"
    missing = [name for name in loaded.required if name.partition(".")[0] not in given.options]
    if missing:
        flags = " ".join(f"--set options.{name}=…" for name in missing)
        return f"its tests are not at hand, and {', '.join(missing)} must be given; {elsewhere} {flags}"
    if record.kind == "model" and not given.config and given.path is None:
        flags = "--set config.model_type=… or --set path=…"
        return f"its tests are not at hand, and a model needs a config; {elsewhere} {flags}"
    return ""


def check_kit(record: PluginRecord, loaded: Loaded, outcomes: Sequence[Outcome]) -> Check:
    """Judge the outcomes of one plugin among those of all conformance classes."""
    theirs = [each for each in outcomes if each.kind == record.kind and each.plugin.rpartition(":")[2] == record.name]
    broken = [each for each in outcomes if each.plugin == _NO_CLASS and each.result == "failed"]
    if not theirs and not broken:
        return Check(kit_of(record), "", (Finding("fault", _missing_class(record)),))
    return _judge(record, loaded, [*theirs, *broken])


def kit_of(record: PluginRecord) -> str:
    """Name of the check."""
    return f"{record.kind} {record.name}, kit"


def _judge(record: PluginRecord, loaded: Loaded, outcomes: Sequence[Outcome]) -> Check:
    """What came of the kit, without what the check of the options has told already."""
    fresh = [each for each in outcomes if each.message not in loaded.option_faults]
    counts = [(result, sum(each.result == result for each in fresh)) for result in ("passed", "failed", "skipped")]
    summary = ", ".join(f"{count} {result}" for result, count in counts if count)
    failed: defaultdict[str, list[str]] = defaultdict(list)
    for each in fresh:
        if each.result == "failed":
            failed[each.message].append(each.test)
    return Check(kit_of(record), summary, tuple(_fault(tests, message) for message, tests in failed.items()))


def _fault(tests: Sequence[str], message: str) -> Finding:
    """One fault for what several tests say alike, such as a fixture that fails."""
    others = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
    return Finding("fault", f"{tests[0]}{others}: {message}")


def _missing_class(record: PluginRecord) -> str:
    cls = f"{record.kind.capitalize()}Conformance"
    return (
        f"no test inherits {cls} for {record.name}; add tests/test_conformance.py:\n"
        f"from cosmos_core.testing import {cls}\n\n\n"
        f"class Test{_title(record)}({cls}):\n"
        f'    plugin = "{record.name}"'
    )


def _class(record: PluginRecord, given: Given) -> str:
    """A conformance class; literals of plain data are their own `repr`."""
    kit = f"{record.kind.capitalize()}Conformance"
    lines = [
        f"from cosmos_core.testing import {kit}",
        f"class Test{_title(record)}({kit}):",
        f"    plugin = {f'{record.distribution}:{record.name}'!r}",
    ]
    if given.config:
        lines.append(f"    config = {dict(given.config)!r}")
    if given.path is not None:
        lines.append(f"    path = {given.path!r}")
    if given.options:
        lines += ["    @pytest.fixture", "    def options(self):", f"        return {dict(given.options)!r}"]
    return "\n".join([*lines, ""])


def _title(record: PluginRecord) -> str:
    """A plugin's name as part of the name of a class."""
    return "".join(part.capitalize() for part in re.split(r"\W|_", record.name))
