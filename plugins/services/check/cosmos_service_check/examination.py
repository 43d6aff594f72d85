"""All checks of a subject, in the order in which a reader wants to hear of them."""

from __future__ import annotations

import contextlib
import datetime as dt
import platform
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from email.message import Message
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final, cast, get_args

import attrs
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from cosmos_core.errors import PluginBrokenError, PluginError
from cosmos_core.plugins.compatibility import (
    CORE,
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
from cosmos_core.scratch import scratch
from cosmos_core.types import JSON
from cosmos_service_check.bounds import core_bounds, core_excess
from cosmos_service_check.probe import Loaded, load
from cosmos_service_check.recorder import Outcome, Result, run_pytest
from cosmos_service_check.subject import Subject
from cosmos_service_check.verdict import Check, Verdict, check, this_environment
from cosmos_service_check.wheel import astray

_IMPORT_BOUND_S: Final = 1.0
_TRIES: Final = 3
_KIT_S: Final = 900.0
_WHEEL_TOOL_S: Final = 60.0
_WHEEL_TOOLS: Final[Mapping[str, Sequence[str]]] = {
    "twine": ("check",),
    # What lies beside the packages of others is told above, and a distribution may have several packages.
    "check_wheel_contents": ("--no-config", "--select", "W001,W004,W006,W007,W008,W010"),
}


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
    for examined in (check_metadata, check_compatibility, check_entry_points, check_files):
        yield examined(subject)
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
    dist, named = subject.distribution, licence(subject.distribution)
    is_described = field(dist, "Description") or str(cast("Message", dist.metadata).get_payload() or "").strip()
    # Others guess the install line of an unknown plugin from its kind and name.
    name, provided = canonicalize_name(subject.name), list(entries(dist.read_text("entry_points.txt") or ""))
    is_guessed = name == CORE or any(name.startswith(f"cosmos-{entry.kind}-") for entry in provided)
    guess = "" if is_guessed else f"cosmos-{provided[0].kind}-{provided[0].name}"
    return check(
        "metadata",
        named,
        fault=[
            _python_problem(field(dist, "Requires-Python")),
            "" if named else 'it has no licence, so nobody may use it; add license = "Apache-2.0" to [project]',
        ],
        warning=[
            "" if field(dist, "Summary") else 'it has no summary; add description = "…" to [project]',
            "" if is_described else 'it has no description; add readme = "README.md" to [project]',
        ],
        note=[f"it is named {name}; {guess} would be found by whoever guesses its name" if guess else ""],
    )


def _python_problem(asked: str) -> str:
    this, wanted = platform.python_version(), 'requires-python = ">=3.11"'
    if not asked:
        return f"it does not say which Pythons it is for; add {wanted} to [project]"
    try:
        is_for_this = SpecifierSet(asked).contains(this, prereleases=True)
    except InvalidSpecifier:
        return f"its Requires-Python is {asked!r}, which is no version specifier; write {wanted} in [project]"
    fitting = "check it with such a Python, or change requires-python in [project]"
    return "" if is_for_this else f"it requires Python {asked}, this is {this}; {fitting}"


def check_compatibility(subject: Subject) -> Check:
    """Check that it can be used with this release of the core and with what is installed."""
    requires = subject.distribution.requires or []
    is_core = canonicalize_name(subject.name) == CORE
    bounds, excess = ("", "") if is_core else (core_bounds(requires), core_excess(requires))
    return check(
        "requirements",
        ", ".join(map(str, core_requirements(requires))),
        fault=[bounds, *(each.problem for each in subject.records if each.status == "incompatible")],
        warning=[] if bounds else [excess],
        not_run=[each for record in subject.records for each in _missing(record)],
    )


def _missing(record: PluginRecord) -> Iterator[str]:
    """Requirements of a plugin that are not installed here, each with the line that installs it."""
    is_readable = EntryPoint.pattern.match(record.module) and not malformed_requirement(record.requires)
    if record.status not in ("broken", "not installed") or not is_readable:
        return
    versions: dict[str, str] = {canonicalize_name(each.name): each.version for each in map(identity, distributions())}
    for each in unmet_requirements(record.requires, versions, record.entry_point.extras):
        yield f"{each.problem}; pip install {shlex.quote(each.requirement)}"


def check_entry_points(subject: Subject) -> Check:
    """Check that a recipe can select each of its plugins."""

    def problems(*statuses: str) -> Iterator[str]:
        for each in subject.records:
            if each.status in statuses and not any(_missing(each)):
                yield f"{each.kind} {each.name}: {each.problem}"

    named = ", ".join(f"{record.kind} {record.name}" for record in subject.records)
    stale = subject.faults if subject.wheel is None else ()
    return check("entry points", named, fault=[*stale, *problems("broken", "invalid")], warning=problems("conflict"))


def check_files(subject: Subject) -> Check:
    """Check for files outside of its own packages, what installers refuse, and packages without `py.typed`."""
    dist, notes = subject.distribution, list[str]()
    faults = [each for module in subject.modules for each in _untyped(module, subject)]
    try:
        if subject.wheel is not None:
            faults = [*subject.faults, *faults, *(_refusal(tool, subject.wheel) for tool in _WHEEL_TOOLS)]
        elif editable_folder(dist) is not None:
            notes = ["an editable installation lists no files; check the wheel: cosmos check dist/NAME.whl"]
        else:
            faults += astray(dist, recorded_files(dist)).values()
            notes = [f"checked is the copy in {dist.locate_file('')}, not the project's"] if subject.project else []
    except PluginBrokenError as error:
        faults.append(str(error))
    return check("files", ", ".join(subject.packages), fault=faults, note=notes)


def _refusal(tool: str, wheel: Path) -> str:
    """The objection of twine, which uploads wheels, or of check-wheel-contents; empty if it has none."""
    command, name = [sys.executable, "-P", "-m", tool, *_WHEEL_TOOLS[tool], str(wheel)], tool.replace("_", "-")
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, cwd=wheel.parent, capture_output=True, timeout=_WHEEL_TOOL_S, check=False)
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        return f"{name} refuses it:\n{said}" if done.returncode != 0 else ""
    return f"{name} did not end in {_WHEEL_TOOL_S:.0f} s"


def _untyped(module: str, subject: Subject) -> Iterator[str]:
    """Yield that `py.typed` is missing in the first package on the way that is no namespace (PEP 561)."""
    root = find_root(module, [str(subject.folder)] if subject.folder is not None else None)
    if root is not None and not (root.path / "py.typed").exists():
        advice = f"{'add' if root.path.is_dir() else 'make the module a package with'} an empty file py.typed"
        missing = f"{root.name.with_suffix('')}/py.typed is missing, so type checkers ignore the annotations"
        yield f"{missing} of {root.name}; {advice}"


def _load(record: PluginRecord, subject: Subject) -> tuple[list[Check], Loaded | None]:
    """Import and load a plugin; None if there is nothing to run the kit on, which the checks then say."""
    name, checks, reason = f"{record.kind} {record.name}", list[Check](), f"is {record.status}"
    loaded = _fastest(record, subject.environment) if record.status in ("ok", "conflict") else None
    if loaded is not None:
        checks.append(check(f"{name}, import", f"{loaded.seconds:.2f} s", fault=_import_faults(record, loaded)))
        reason = "cannot be imported" if loaded.unimported else ""
    if loaded is not None and not loaded.unimported:
        found = {"fault": [loaded.unusable], "warning": [loaded.deprecation]}
        checks.append(check(f"{name}, protocol", f"version {loaded.protocol or 'unknown'}", **found))
        reason = "cannot be loaded" if loaded.unusable else ""
    if not reason:
        return checks, loaded
    left = ", ".join(["import", "protocol", "kit"][len(checks) :])
    return [*checks, check(f"{name}, {left}", not_run=[f"the plugin {reason}: see above"])], None


def _import_faults(record: PluginRecord, loaded: Loaded) -> Iterator[str]:
    if loaded.unimported:
        yield f"{record.module} cannot be imported: {loaded.unimported}"
    if loaded.seconds > _IMPORT_BOUND_S:
        slow = f"{record.module} takes {loaded.seconds:.1f} s to import, allowed is {_IMPORT_BOUND_S:.0f} s"
        yield f"{slow}; import what is slow in the function that needs it"
    yield from loaded.brought


def _fastest(record: PluginRecord, environment: Mapping[str, str]) -> Loaded:
    """Import a plugin in fresh processes: the fastest of three counts, and one that is within the bound will do."""
    fastest = load(record, environment)
    for _ in range(_TRIES - 1):
        if fastest.unimported or fastest.seconds <= _IMPORT_BOUND_S:
            break
        fastest = min(fastest, load(record, environment), key=lambda each: each.seconds)
    return fastest


def _kits(subject: Subject, usable: Mapping[PluginRecord, Loaded], given: Given) -> Iterator[Check]:
    project = subject.project if given == Given() else None
    gaps = {record: _gap(record, loaded, given) if project is None else "" for record, loaded in usable.items()}
    yield from (check(f"{each.kind} {each.name}, kit", not_run=[gap]) for each, gap in gaps.items() if gap)
    ready = {record: usable[record].kit for record, gap in gaps.items() if not gap}
    try:
        outcomes = run_kits(subject, ready, project, given) if ready else []
    except PluginError as error:
        yield check("kit", fault=[str(error)])
        return
    yield from (_check_kit(record, kit, outcomes) for record, kit in ready.items())


def run_kits(
    subject: Subject, kits: Mapping[PluginRecord, str], project: Path | None, given: Given
) -> Sequence[Outcome]:
    """Run the conformance classes in a project's tests, or one of its kit for each plugin, made on the spot.

    Raises:
        PluginError: pytest could not run, or took too long.
    """
    with scratch("check") as place:
        if project is None:
            classes = (_class(each, f"{each.distribution}:{each.name}", kit, given) for each, kit in kits.items())
            (place / "test_conformance.py").write_text("\n".join(["import pytest", *classes]))
        return run_pytest(
            project or place,
            timeout_s=_KIT_S,
            environment=subject.environment,
            modules=attrs.evolve(subject, records=[*kits]).packages,
            plugins=[(record.kind, record.name) for record in kits],
        )


def _gap(record: PluginRecord, loaded: Loaded, given: Given) -> str:
    """The reason why a class made on the spot cannot do, and what to do; empty if it can."""
    flags = [f"--set options.{name}=…" for name in loaded.required if name.partition(".")[0] not in given.options]
    if record.kind == "model" and not given.config and given.path is None:
        flags.append("--set config.model_type=… or --set path=…")
    wanted = "its tests are not at hand; check the project's folder, whose tests say what to test with, or give"
    return f"{wanted} {' '.join(flags)}" if flags else ""


def _check_kit(record: PluginRecord, kit: str, outcomes: Sequence[Outcome]) -> Check:
    """Judge the outcomes of one plugin among those of all conformance classes."""
    name = f"{record.kind} {record.name}, kit"
    theirs = [each for each in outcomes if each.kind == record.kind and each.plugin.rpartition(":")[2] == record.name]
    # A module that cannot be collected is in no class.
    broken = [each for each in outcomes if not each.plugin and each.result == "failed"]
    if not theirs and not broken:
        head = f"no test inherits {kit} for {record.name}; add tests/test_conformance.py:"
        return check(name, fault=[f"{head}\n{_class(record, record.name, kit, Given())}"])
    results = {result: [each for each in theirs if each.result == result] for result in get_args(Result)}
    summary = ", ".join(f"{len(each)} {result}" for result, each in results.items() if each and result != "not run")
    failed, uncollected, left = map(_alike, (results["failed"], broken, results["not run"]))
    # Where the kit is complete, what cannot be collected is another test.
    if theirs and not left:
        return check(name, summary, fault=failed, warning=uncollected)
    return check(name, summary, fault=[*failed, *uncollected], not_run=left)


def _alike(outcomes: Iterable[Outcome]) -> list[str]:
    """One text for what several tests say alike, such as a fixture that fails."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for each in outcomes:
        tests[each.message].append(each.test)
    others = {message: f" and {len(names) - 1} more" if len(names) > 1 else "" for message, names in tests.items()}
    return [f"{names[0]}{others[message]}: {message}" for message, names in tests.items()]


def _class(record: PluginRecord, plugin: str, kit: str, given: Given) -> str:
    """A module with a conformance class; literals of plain data are their own `repr`."""
    title = "".join(part.capitalize() for part in re.split(r"\W|_", record.name))
    head = ["from cosmos_core.testing import " + kit, "", "", f"class Test{title}({kit}):", f'    plugin = "{plugin}"']
    body = [f"    {name} = {value!r}" for name, value in (("config", given.config), ("path", given.path)) if value]
    if given.options:
        body += ["    @pytest.fixture", "    def options(self):", f"        return {given.options!r}"]
    return "\n".join([*head, *body])
