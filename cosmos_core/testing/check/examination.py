"""All checks of a subject, in the order in which a reader wants to hear of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cosmos_core.errors import PluginError
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.testing.check.asking import ask_load
from cosmos_core.testing.check.files import check_files
from cosmos_core.testing.check.importing import check_import
from cosmos_core.testing.check.kit import Given, check_kit, gap, kit_of, run_generic, run_own
from cosmos_core.testing.check.metadata import check_compatibility, check_entry_points, check_metadata
from cosmos_core.testing.check.probe import Loaded
from cosmos_core.testing.check.subject import Subject
from cosmos_core.testing.check.verdict import Check, Finding, Verdict, faults, this_environment

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
