"""All checks of a subject, in the order in which a reader wants to hear of them."""

from __future__ import annotations

import datetime as dt
import importlib.util
import platform
import re
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from email.message import Message
from importlib.metadata import EntryPoint
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
from cosmos_core.testing.check.probe import Loaded
from cosmos_core.testing.check.processes import load, run_pytest
from cosmos_core.testing.check.recorder import Outcome
from cosmos_core.testing.check.subject import Subject
from cosmos_core.testing.check.verdict import Check, Finding, Level, Verdict, faults, this_environment
from cosmos_core.testing.check.wheel import astray
from cosmos_core.testing.conformance.processes import run
from cosmos_core.types import JSON

IMPORT_BOUND_S: Final = 1.0
_TRIES: Final = 3
_KIT_S: Final = 900.0
_WHEEL_TOOL_S: Final = 60.0
_WHEEL_TOOLS: Final[Mapping[str, Sequence[str]]] = {
    "twine": ("check",),
    # What lies beside the packages of others is told above, and a distribution may have several packages.
    "check_wheel_contents": ("--no-config", "--select", "W001,W004,W006,W007,W008,W010"),
}
_LEVELS: Final[Mapping[str, Level]] = {"broken": "fault", "invalid": "fault", "conflict": "warning"}


@attrs.frozen(kw_only=True)
class Given:
    """The options, and for a model a small Hugging Face config or a checkpoint's folder, to test with."""

    options: Mapping[str, JSON] = attrs.field(factory=dict)
    config: Mapping[str, JSON] = attrs.field(factory=dict)
    path: str | None = None


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
    for check in (check_metadata, check_compatibility, check_entry_points, check_files):
        yield check(subject)
    usable: dict[PluginRecord, Loaded] = {}
    for record in subject.records:
        progress(f"Importing {record.module}")
        checks, loaded = _load(record, subject)
        yield from checks
        if loaded is not None:
            usable[record] = loaded
    progress(f"Running the kit on {', '.join(record.name for record in usable)}")
    yield from _kits(subject, usable, given)


def check_metadata(subject: Subject) -> Check:
    """Check that the description is complete."""
    dist = subject.distribution
    findings = [Finding("fault", problem) for problem in _python_problems(field(dist, "Requires-Python"))]
    if not licence(dist):
        problem = 'it has no licence, so nobody may use it; add license = "Apache-2.0" to [project]'
        findings.append(Finding("fault", problem))
    if not field(dist, "Summary"):
        findings.append(Finding("warning", 'it has no summary; add description = "…" to [project]'))
    if not (field(dist, "Description") or str(cast("Message", dist.metadata).get_payload() or "").strip()):
        findings.append(Finding("warning", 'it has no description; add readme = "README.md" to [project]'))
    # Others guess the install line of an unknown plugin from its kind and name.
    name, provided = canonicalize_name(subject.name), list(entries(dist.read_text("entry_points.txt") or ""))
    if name != CORE and not any(name.startswith(f"cosmos-{entry.kind}-") for entry in provided):
        guessed = f"cosmos-{provided[0].kind}-{provided[0].name}"
        findings.append(Finding("note", f"it is named {name}; {guessed} would be found by whoever guesses its name"))
    return Check("metadata", licence(dist), tuple(findings))


def _python_problems(asked: str) -> Iterator[str]:
    if not asked:
        yield 'it does not say which Pythons it is for; add requires-python = ">=3.11" to [project]'
        return
    try:
        if not SpecifierSet(asked).contains(platform.python_version(), prereleases=True):
            yield f"it requires Python {asked}, this is {platform.python_version()}"
    except InvalidSpecifier:
        yield f"Requires-Python is {asked!r}, which is no version specifier such as >=3.11"


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


def _missing(record: PluginRecord) -> Iterator[str]:
    """Requirements of a plugin that are not installed here, each with the line that installs it."""
    is_readable = EntryPoint.pattern.match(record.module) and not malformed_requirement(record.requires)
    if record.status != "broken" or not is_readable:
        return
    versions: dict[str, str] = {canonicalize_name(each.name): each.version for each in map(identity, distributions())}
    for line in record.requires:
        if problem := unmet_requirements([line], versions, record.entry_point.extras):
            requirement = Requirement(line)
            requirement.marker = None
            yield f"{problem}; pip install {shlex.quote(str(requirement))}"


def check_entry_points(subject: Subject) -> Check:
    """Check that a recipe can select each of its plugins."""
    named = ", ".join(f"{record.kind} {record.name}" for record in subject.records)
    unusable = [
        Finding(_LEVELS[record.status], f"{record.kind} {record.name}: {record.problem}")
        for record in subject.records
        if record.status in _LEVELS and not any(_missing(record))
    ]
    return Check("entry points", named, (*faults([subject.stale]), *unusable))


def check_files(subject: Subject) -> Check:
    """Check for files outside of its own packages, what installers refuse, and packages without `py.typed`."""
    own, dist, wheel = ", ".join(subject.packages), subject.distribution, subject.wheel
    untyped = dict.fromkeys(each for module in subject.modules for each in _untyped(module, subject))
    if wheel is not None:
        found = (*faults([*wheel.faults, *untyped]), *_refused(wheel.file))
        return Check("files", f"{len(wheel.files)}, in {own}", found)
    try:
        if editable_folder(dist) is not None:
            hint = "an editable installation lists no files; check the wheel, too: cosmos plugins check dist/NAME.whl"
            return Check("files", own, (*faults(untyped), Finding("note", hint)))
        files = recorded_files(dist)
    except PluginBrokenError as error:
        return Check("files", own, faults([str(error), *untyped]))
    copy = f"checked is the copy in {dist.locate_file('')}, not the project's"
    notes = () if subject.project is None else (Finding("note", copy),)
    return Check("files", f"{len(files)}, in {own}", (*faults([*astray(dist, files).values(), *untyped]), *notes))


def _refused(wheel: Path) -> Iterator[Finding]:
    """Findings of twine, which uploads wheels, and of check-wheel-contents."""
    for module, arguments in _WHEEL_TOOLS.items():
        name = module.replace("_", "-")
        if importlib.util.find_spec(module) is None:
            yield Finding("not run", f'{name} is not installed; pip install "cosmos-core[testing]"')
            continue
        code, said = run(module, [*arguments, str(wheel)], folder=wheel.parent, timeout_s=_WHEEL_TOOL_S)
        if code:
            yield Finding("fault", f"{name} refuses it:\n{said.strip()}")


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


def _load(record: PluginRecord, subject: Subject) -> tuple[list[Check], Loaded | None]:
    """Import and load a plugin; None if there is nothing to run the kit on, which the checks then say."""
    name = f"{record.kind} {record.name}"

    def left_out(parts: str, reason: str) -> Check:
        return Check(f"{name}, {parts}", "", (Finding("not run", f"the plugin {reason}: see above"),))

    if record.status not in ("ok", "conflict"):
        return [left_out("import, protocol, options, kit", f"is {record.status}")], None
    loaded = _fastest(record, subject.environment)
    if loaded.unimported:
        imported = Check(f"{name}, import", "", faults([f"{record.module} cannot be imported: {loaded.unimported}"]))
        return [imported, left_out("protocol, options, kit", "cannot be imported")], None
    imported = Check(f"{name}, import", f"{loaded.seconds:.2f} s", faults(_import_problems(record, loaded)))
    if loaded.unusable:
        refused = Check(f"{name}, protocol", "", faults([loaded.unusable]))
        return [imported, refused, left_out("options, kit", "cannot be loaded")], None
    deprecated = (Finding("warning", loaded.deprecation),) if loaded.deprecation else ()
    protocol = Check(f"{name}, protocol", f"version {loaded.protocol}", deprecated)
    options = Check(f"{name}, options", str(loaded.num_options), faults(loaded.option_faults))
    return [imported, protocol, options], loaded


def _fastest(record: PluginRecord, environment: Mapping[str, str]) -> Loaded:
    """Import a plugin in fresh processes: the fastest of three counts, and one that is within the bound will do."""
    fastest = load(record, environment)
    for _ in range(_TRIES - 1):
        if fastest.unimported or fastest.seconds <= IMPORT_BOUND_S:
            break
        fastest = min(fastest, load(record, environment), key=lambda each: each.seconds)
    return fastest


def _import_problems(record: PluginRecord, done: Loaded) -> Iterator[str]:
    module = record.module
    if done.seconds > IMPORT_BOUND_S:
        slow = f"{module} takes {done.seconds:.1f} s to import, allowed is {IMPORT_BOUND_S:.0f} s"
        yield f"{slow}; import what is slow in the function that needs it"
    if done.heavy and record.kind not in ("model", "engine"):
        yield f"{module} imports {', '.join(done.heavy)}; import it in the function that needs it"
    for what, names in (("threads", done.threads), ("processes", done.processes)):
        if names:
            yield f"importing {module} starts {what} ({', '.join(names)}); start them when it is used"
    if done.printed:
        yield f"importing {module} prints {done.printed.splitlines()[0]!r}; print nothing, or use logging"


def _kits(subject: Subject, usable: Mapping[PluginRecord, Loaded], given: Given) -> Iterator[Check]:
    project = subject.project if given == Given() else None
    gaps = {record: _gap(record, loaded, given) if project is None else "" for record, loaded in usable.items()}
    yield from (Check(_kit_of(record), "", (Finding("not run", gap),)) for record, gap in gaps.items() if gap)
    ready = [record for record, gap in gaps.items() if not gap]
    if not ready:
        return
    try:
        outcomes = run_kits(subject, ready, project, given)
    except PluginError as error:
        yield Check("kit", "", faults([str(error)]))
        return
    yield from (_check_kit(record, usable[record], outcomes) for record in ready)


def run_kits(
    subject: Subject, records: Sequence[PluginRecord], project: Path | None, given: Given
) -> Sequence[Outcome]:
    """Run the conformance classes in a project's tests, or one for each plugin that is made on the spot.

    Raises:
        PluginError: pytest could not run, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="cosmos-check-") as scratch:
        if project is None:
            source = "\n".join(["import pytest", *(_class(record, given) for record in records)])
            (Path(scratch) / "test_conformance.py").write_text(source)
        return run_pytest(
            [],
            folder=project or Path(scratch),
            timeout_s=_KIT_S,
            environment=subject.environment,
            modules=attrs.evolve(subject, records=records).packages,
            plugins=None if project is None else [(record.kind, record.name) for record in records],
        )


def _gap(record: PluginRecord, loaded: Loaded, given: Given) -> str:
    """Why a class made on the spot cannot do, and what to do; empty if it can."""
    missing = [name for name in loaded.required if name.partition(".")[0] not in given.options]
    if missing:
        needs, flags = f"{', '.join(missing)} must be given", " ".join(f"--set options.{name}=…" for name in missing)
    elif record.kind == "model" and not given.config and given.path is None:
        needs, flags = "a model needs a config", "--set config.model_type=… or --set path=…"
    else:
        return ""
    elsewhere = "check the project's folder, whose tests say what to test with, or give"
    return f"its tests are not at hand, and {needs}; {elsewhere} {flags}"


def _check_kit(record: PluginRecord, loaded: Loaded, outcomes: Sequence[Outcome]) -> Check:
    """Judge the outcomes of one plugin among those of all conformance classes."""
    theirs = [each for each in outcomes if each.kind == record.kind and each.plugin.rpartition(":")[2] == record.name]
    # A module that cannot be collected is in no class.
    broken = [each for each in outcomes if not each.plugin and each.result == "failed"]
    if not theirs and not broken:
        return Check(_kit_of(record), "", faults([_missing_class(record)]))
    # What the check of the options has told already is not told again.
    told = {*loaded.option_faults}
    fresh = [each for each in theirs if not each.message or not told.issuperset(each.message.splitlines())]
    left = _alike("not run", (each for each in fresh if each.result == "not run"))
    failed = _alike("fault", (each for each in fresh if each.result == "failed"))
    # Where the kit is complete, what cannot be collected is another test.
    uncollected = _alike("warning" if theirs and not left else "fault", broken)
    counts = ((result, sum(each.result == result for each in fresh)) for result in ("passed", "failed", "skipped"))
    summary = ", ".join(f"{count} {result}" for result, count in counts if count)
    return Check(_kit_of(record), summary, (*failed, *uncollected, *left))


def _kit_of(record: PluginRecord) -> str:
    """Name of the check."""
    return f"{record.kind} {record.name}, kit"


def _alike(level: Level, outcomes: Iterable[Outcome]) -> list[Finding]:
    """One finding for what several tests say alike, such as a fixture that fails."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for each in outcomes:
        tests[each.message].append(each.test)
    others = {message: f" and {len(names) - 1} more" if len(names) > 1 else "" for message, names in tests.items()}
    return [Finding(level, f"{names[0]}{others[message]}: {message}") for message, names in tests.items()]


def _missing_class(record: PluginRecord) -> str:
    kit, *rest = _head(record, record.name)
    head = f"no test inherits {record.kind.capitalize()}Conformance for {record.name}; add tests/test_conformance.py:"
    return "\n".join([head, kit, "", "", *rest])


def _class(record: PluginRecord, given: Given) -> str:
    """A conformance class; literals of plain data are their own `repr`."""
    lines = _head(record, f"{record.distribution}:{record.name}")
    if given.config:
        lines.append(f"    config = {dict(given.config)!r}")
    if given.path is not None:
        lines.append(f"    path = {given.path!r}")
    if given.options:
        lines += ["    @pytest.fixture", "    def options(self):", f"        return {dict(given.options)!r}"]
    return "\n".join([*lines, ""])


def _head(record: PluginRecord, plugin: str) -> list[str]:
    kit = f"{record.kind.capitalize()}Conformance"
    title = "".join(part.capitalize() for part in re.split(r"\W|_", record.name))
    return [f"from cosmos_core.testing import {kit}", f"class Test{title}({kit}):", f'    plugin = "{plugin}"']
