"""All checks of a subject, in the order in which a reader wants to hear of them."""

from __future__ import annotations

import datetime as dt
import importlib.util
import platform
import re
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from email.message import Message
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Final, cast

import attrs
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from cosmos_core.errors import PluginBrokenError, PluginError
from cosmos_core.plugins.compatibility import (
    CORE,
    core_bounds,
    core_excess,
    core_requirements,
    malformed_requirement,
    unmet_requirements,
)
from cosmos_core.plugins.discovery import PluginRecord, entries
from cosmos_core.plugins.distributions import (
    distributions,
    editable_folder,
    field,
    find_root,
    identity,
    licence,
    recorded_files,
)
from cosmos_core.testing.check.probe import Import, Loaded
from cosmos_core.testing.check.processes import ask_import, ask_load, run, run_pytest
from cosmos_core.testing.check.recorder import Outcome
from cosmos_core.testing.check.subject import Subject, packages
from cosmos_core.testing.check.verdict import Check, Finding, Level, Verdict, faults, this_environment
from cosmos_core.testing.check.wheel import astray
from cosmos_core.types import JSON

_LONGEST_S: Final = 900.0
_NO_CLASS: Final = ""
"""The plugin of an outcome outside of the conformance classes: a module that cannot be collected."""


@attrs.frozen(kw_only=True)
class Given:
    """The options and the model that the user gives the kit to test with.

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
        """True if nothing was given."""
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


_LEVELS: Final[Mapping[str, Level]] = {"broken": "fault", "invalid": "fault", "conflict": "warning"}


def check_metadata(subject: Subject) -> Check:
    """Check that the description is complete."""
    dist = subject.distribution
    findings = [*_description(dist), *_pythons(dist), *_name(subject)]
    return Check("metadata", licence(dist), tuple(findings))


def check_compatibility(subject: Subject) -> Check:
    """Check that it can be used with this release of the core and with what is installed."""
    requires = subject.distribution.requires or []
    is_core = canonicalize_name(subject.name) == CORE
    bounds, excess = ("", "") if is_core else (core_bounds(requires), core_excess(requires))
    # Each record of a distribution may tell the same.
    told = dict.fromkeys(each.problem for each in subject.records if each.status == "incompatible")
    missing = dict.fromkeys(each for record in subject.records for each in _missing(record))
    findings = (
        *faults([bounds, *told]),
        *((Finding("warning", excess),) if excess and not bounds else ()),
        *(Finding("not run", each) for each in missing),
    )
    return Check("requirements", ", ".join(map(str, core_requirements(requires))), findings)


def check_entry_points(subject: Subject) -> Check:
    """Check that a recipe can select each of its plugins."""
    named = ", ".join(f"{record.kind} {record.name}" for record in subject.records)
    unusable = [
        Finding(_LEVELS[record.status], f"{record.kind} {record.name}: {record.problem}")
        for record in subject.records
        if record.status in _LEVELS and not _missing(record)
    ]
    return Check("entry points", named, (*faults([subject.stale]), *unusable))


def _missing(record: PluginRecord) -> list[str]:
    """Requirements of a plugin that are not installed here, each with the line that installs it."""
    if (
        record.status != "broken"
        or not EntryPoint.pattern.match(record.module)
        or malformed_requirement(record.requires)
    ):
        return []
    versions: dict[str, str] = {canonicalize_name(each.name): each.version for each in map(identity, distributions())}
    extras = record.entry_point.extras
    unmet = ((line, unmet_requirements([line], versions, extras)) for line in record.requires)
    return [f"{problem}; {_install(Requirement(line))}" for line, problem in unmet if problem]


def _install(requirement: Requirement) -> str:
    requirement.marker = None
    return f"pip install {shlex.quote(str(requirement))}"


def _description(dist: Distribution) -> Iterator[Finding]:
    if not licence(dist):
        yield Finding("fault", 'it has no licence, so nobody may use it; add license = "Apache-2.0" to [project]')
    if not field(dist, "Summary"):
        yield Finding("warning", 'it has no summary; add description = "…" to [project]')
    message = cast("Message", dist.metadata)
    if not (field(dist, "Description") or str(message.get_payload() or "").strip()):
        yield Finding("warning", 'it has no description; add readme = "README.md" to [project]')


def _pythons(dist: Distribution) -> Iterator[Finding]:
    asked = field(dist, "Requires-Python")
    if not asked:
        yield Finding("fault", 'it does not say which Pythons it is for; add requires-python = ">=3.11" to [project]')
        return
    try:
        fits = SpecifierSet(asked).contains(platform.python_version(), prereleases=True)
    except InvalidSpecifier:
        yield Finding("fault", f"Requires-Python is {asked!r}, which is no version specifier such as >=3.11")
        return
    if not fits:
        yield Finding("fault", f"it requires Python {asked}, this is {platform.python_version()}")


def _name(subject: Subject) -> Iterator[Finding]:
    """Others guess the install line of an unknown plugin from its kind and name."""
    name = canonicalize_name(subject.name)
    provided = list(entries(subject.distribution.read_text("entry_points.txt") or ""))
    if name != CORE and not any(name.startswith(f"cosmos-{entry.kind}-") for entry in provided):
        kind, plugin = provided[0].kind, provided[0].name
        yield Finding("note", f"it is named {name}; cosmos-{kind}-{plugin} would be found by whoever guesses its name")


_WHEEL_TOOLS: Final[Mapping[str, Sequence[str]]] = {
    "twine": ("check",),
    # What lies beside the packages of others is told above, and a distribution may have several packages.
    "check_wheel_contents": ("--no-config", "--select", "W001,W004,W006,W007,W008,W010"),
}
_WHEEL_TOOL_S: Final = 60.0
_INSTALLED_ONLY: Final = Finding(
    "note", "an editable installation lists no files; check the wheel, too: cosmos plugins check dist/NAME.whl"
)


def check_files(subject: Subject) -> Check:
    """Check for files outside of its own packages, what installers refuse, and packages without `py.typed`."""
    own = ", ".join(packages(subject.records))
    typing = dict.fromkeys(each for module in subject.modules for each in _untyped(module, subject))
    if subject.wheel is not None:
        found = (*faults([*subject.wheel.faults, *typing]), *_refused(subject.wheel.file))
        return Check("files", f"{len(subject.wheel.files)}, in {own}", found)
    try:
        if editable_folder(subject.distribution) is not None:
            return Check("files", own, (*faults(typing), _INSTALLED_ONLY))
        files = recorded_files(subject.distribution)
    except PluginBrokenError as error:
        return Check("files", own, faults([str(error), *typing]))
    found = faults([*astray(subject.distribution, files).values(), *typing])
    return Check("files", f"{len(files)}, in {own}", (*found, *_copy(subject.distribution, subject)))


def _refused(wheel: Path) -> Iterator[Finding]:
    """Findings of twine, which uploads wheels, and of check-wheel-contents."""
    for module, arguments in _WHEEL_TOOLS.items():
        name = module.replace("_", "-")
        if importlib.util.find_spec(module) is None:
            yield Finding("not run", f'{name} is not installed; pip install "cosmos-core[testing]"')
            continue
        ended = run(module, [*arguments, str(wheel)], folder=wheel.parent, environment={}, timeout_s=_WHEEL_TOOL_S)
        if ended.code:
            yield Finding("fault", f"{name} refuses it:\n{ended.output.strip()}")


def _untyped(module: str, subject: Subject) -> Iterator[str]:
    """Where type checkers look for `py.typed`: in the first package on the way that is no namespace (PEP 561)."""
    root = find_root(module, [str(subject.wheel.folder)] if subject.wheel is not None else None)
    if root is None:
        return
    if not root.path.is_dir():
        yield (
            f"{root.name} is a single module, for which type checkers ignore its annotations; make it a package: "
            f"{root.name.with_suffix('')}/__init__.py, with an empty file py.typed beside it"
        )
    elif not (root.path / "py.typed").exists():
        missing = f"{root.name}/py.typed is missing"
        yield f"{missing}, so type checkers ignore its annotations; add an empty file of that name"


def _copy(dist: Distribution, subject: Subject) -> Iterator[Finding]:
    """A word on where the files are, if the project lies elsewhere."""
    if subject.project is not None:
        yield Finding("note", f"checked is the copy in {dist.locate_file('')}, not the project's")


BOUND_S: Final = 1.0
_TRIES: Final = 3


def check_import(record: PluginRecord, environment: Mapping[str, str]) -> Check:
    """Import a plugin in fresh processes: the fastest of three counts, and one that is within the bound will do.

    The check has a summary if the plugin could be imported.
    """
    name = f"{record.kind} {record.name}, import"
    try:
        fastest = ask_import(record, environment)
        for _ in range(_TRIES - 1):
            if fastest.error or fastest.seconds <= BOUND_S:
                break
            fastest = min(fastest, ask_import(record, environment), key=lambda each: each.seconds)
    except PluginError as error:
        return Check(name, "", (Finding("fault", str(error)),))
    if fastest.error:
        return Check(name, "", (Finding("fault", f"{record.module} cannot be imported: {fastest.error}"),))
    return Check(name, f"{fastest.seconds:.2f} s", faults(_problems(record, fastest)))


def _problems(record: PluginRecord, done: Import) -> Iterator[str]:
    if done.seconds > BOUND_S:
        yield (
            f"{record.module} takes {done.seconds:.1f} s to import, allowed is {BOUND_S:.0f} s; "
            "import what is slow in the function that needs it"
        )
    if done.heavy and record.kind not in ("model", "engine"):
        yield f"{record.module} imports {', '.join(done.heavy)}; import it in the function that needs it"
    if done.threads:
        yield f"importing {record.module} starts threads ({', '.join(done.threads)}); start them when it is used"
    if done.processes:
        yield f"importing {record.module} starts processes ({', '.join(done.processes)}); start them when it is used"
    if done.printed:
        yield f"importing {record.module} prints {done.printed.splitlines()[0]!r}; print nothing, or use logging"


_ONCE_LOADED: Final = ("options", "kit")
_ONCE_IMPORTED: Final = ("protocol", *_ONCE_LOADED)


def examine(subject: Subject, given: Given, progress: Callable[[str], None]) -> Verdict:
    """Make every check.

    Args:
        subject: What to check.
        given: What to test with; if it is not empty, the kit is made on the spot instead of the project's own.
        progress: Told what is being done.
    """
    return Verdict(
        distribution=f"{subject.name} {subject.distribution.version}",
        plugins=tuple(f"{record.kind} {record.name}" for record in subject.records),
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        environment=this_environment(),
        checks=tuple(_checks(subject, given, progress)),
    )


def _checks(subject: Subject, given: Given, progress: Callable[[str], None]) -> Iterator[Check]:
    progress("Reading the metadata")
    yield check_metadata(subject)
    yield check_compatibility(subject)
    yield check_entry_points(subject)
    yield check_files(subject)
    usable: list[tuple[PluginRecord, Loaded]] = []
    for record in subject.records:
        progress(f"Importing {record.module}")
        checks, loaded = _load(record, subject)
        yield from checks
        if loaded is not None:
            usable.append((record, loaded))
    yield from _kits(subject, usable, given, progress)


def _load(record: PluginRecord, subject: Subject) -> tuple[list[Check], Loaded | None]:
    """Import and load a plugin; None if there is nothing to run the kit on, which the checks then say."""
    name = f"{record.kind} {record.name}"
    if record.status not in ("ok", "conflict"):
        return [_left_out(name, ("import", *_ONCE_IMPORTED), f"the plugin is {record.status}")], None
    imported = check_import(record, subject.environment)
    if not imported.summary:
        return [imported, _left_out(name, _ONCE_IMPORTED, "the plugin cannot be imported")], None
    try:
        loaded = ask_load(record, subject.environment)
    except PluginError as error:
        loaded = Loaded(error=str(error))
    if loaded.error:
        refused = Check(f"{name}, protocol", "", faults([loaded.error]))
        return [imported, refused, _left_out(name, _ONCE_LOADED, "the plugin cannot be loaded")], None
    deprecated = (Finding("warning", loaded.deprecation),) if loaded.deprecation else ()
    return [
        imported,
        Check(f"{name}, protocol", f"version {loaded.protocol}", deprecated),
        Check(f"{name}, options", str(loaded.num_options), faults(loaded.option_faults)),
    ], loaded


def _left_out(name: str, parts: Sequence[str], reason: str) -> Check:
    return Check(f"{name}, {', '.join(parts)}", "", (Finding("not run", f"{reason}: see above"),))


def _kits(
    subject: Subject, usable: Sequence[tuple[PluginRecord, Loaded]], given: Given, progress: Callable[[str], None]
) -> Iterator[Check]:
    project = subject.project if given.is_empty else None
    gaps = {record: gap(record, loaded, given) for record, loaded in usable} if project is None else {}
    ready = [(record, loaded) for record, loaded in usable if not gaps.get(record)]
    records = [record for record, _ in ready]
    progress(f"Running the kit on {', '.join(record.name for record in records)}")
    for record, reason in gaps.items():
        if reason:
            yield Check(kit_of(record), "", (Finding("not run", reason),))
    if not ready:
        return
    try:
        outcomes = run_own(subject, project, records) if project is not None else run_generic(subject, records, given)
    except PluginError as error:
        yield Check("kit", "", (Finding("fault", str(error)),))
        return
    for record, loaded in ready:
        yield check_kit(record, loaded, outcomes)
