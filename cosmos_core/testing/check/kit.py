"""The conformance kit of a plugin: its project's own classes, or, where they are not at hand, one made on the spot."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.testing.check.probe import Loaded
from cosmos_core.testing.check.processes import run_pytest
from cosmos_core.testing.check.recorder import Outcome
from cosmos_core.testing.check.subject import Subject, packages
from cosmos_core.testing.check.verdict import Check, Finding, Level
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


def run_own(subject: Subject, project: Path, records: Sequence[PluginRecord]) -> list[Outcome]:
    """Run the conformance classes in a project's tests, wherever and however the project's pytest finds them.

    Raises:
        PluginError: pytest could not run, or took too long.
    """
    return _run(subject, project, records, plugins=[(record.kind, record.name) for record in records])


def run_generic(subject: Subject, records: Sequence[PluginRecord], given: Given) -> list[Outcome]:
    """Run a conformance class for each plugin, made on the spot.

    Raises:
        PluginError: pytest could not run, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="cosmos-check-") as scratch:
        folder = Path(scratch)
        source = "\n".join(["import pytest", *(_class(record, given) for record in records)])
        (folder / "test_conformance.py").write_text(source)
        return _run(subject, folder, records, plugins=None)


def _run(
    subject: Subject,
    folder: Path,
    records: Sequence[PluginRecord],
    plugins: Collection[tuple[str, str]] | None,
) -> list[Outcome]:
    return run_pytest(
        [],
        folder=folder,
        timeout_s=_LONGEST_S,
        environment=subject.environment,
        modules=packages(records),
        plugins=plugins,
    )


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
    # What the check of the options has told already is not told again.
    fresh = [each for each in theirs if each.message not in loaded.option_faults]
    left = _findings("not run", (each for each in fresh if each.result == "not run"))
    failed = _findings("fault", (each for each in fresh if each.result == "failed"))
    # Where the kit is complete, what cannot be collected is another test.
    uncollected = _findings("warning" if theirs and not left else "fault", broken)
    return Check(kit_of(record), _counts(fresh), (*failed, *uncollected, *left))


def kit_of(record: PluginRecord) -> str:
    """Name of the check."""
    return f"{record.kind} {record.name}, kit"


def _counts(outcomes: Sequence[Outcome]) -> str:
    counts = ((result, sum(each.result == result for each in outcomes)) for result in ("passed", "failed", "skipped"))
    return ", ".join(f"{count} {result}" for result, count in counts if count)


def _findings(level: Level, outcomes: Iterable[Outcome]) -> list[Finding]:
    """One for what several tests say alike, such as a fixture that fails."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for each in outcomes:
        tests[each.message].append(each.test)
    others = {message: f" and {len(names) - 1} more" if len(names) > 1 else "" for message, names in tests.items()}
    return [Finding(level, f"{names[0]}{others[message]}: {message}") for message, names in tests.items()]


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
