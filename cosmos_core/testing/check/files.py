"""Whether a distribution puts files only where they are its own, and types for those who use it."""

from __future__ import annotations

import csv
import importlib.metadata
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Final

from packaging.utils import canonicalize_name

from cosmos_core.plugin.compatibility import CORE
from cosmos_core.plugin.source import editable_folder, field
from cosmos_core.testing.check.subject import Subject
from cosmos_core.testing.check.verdict import Check, Finding, faults

_EVERYBODYS: Final = frozenset(
    {
        "benchmarks",
        "conftest",
        "doc",
        "docs",
        "example",
        "examples",
        "plugin",
        "scripts",
        "setup",
        "src",
        "test",
        "tests",
    }
)
"""Top-level names that every second project has; in `site-packages` they would overwrite one another."""
_INSTALLED_ONLY: Final = Finding(
    "note", "an editable installation lists no files; check the wheel, too: cosmos plugins check dist/NAME.whl"
)


def check_files(subject: Subject) -> Check:
    """What lies outside of its own packages, and packages without `py.typed`."""
    packages = sorted({each.partition(".")[0] for each in subject.modules})
    if editable_folder(subject.distribution) is not None:
        typed = [package for package in packages if any((each / "py.typed").exists() for each in _folders(package))]
        return Check("files", ", ".join(packages), (*faults(_untyped(packages, typed)), _INSTALLED_ONLY))
    files = _recorded(subject.distribution)
    typed = [file.parts[0] for file in files if file.parts[1:] == ("py.typed",)]
    found = [*faults(_astray(subject, files)), *faults(_untyped(packages, typed))]
    if subject.project is not None and subject.path is None:
        found.append(
            Finding("note", f"checked is the copy in {subject.distribution.locate_file('')}, not the project's")
        )
    return Check("files", f"{len(files)}, in {', '.join(packages)}", tuple(found))


def _recorded(dist: Distribution) -> list[PurePosixPath]:
    """What a distribution installs among the packages of all others."""
    rows = csv.reader((dist.read_text("RECORD") or "").splitlines())
    files = [PurePosixPath(row[0]) for row in rows if row]
    return [
        file
        for file in files
        if file.parts[0] not in ("..", "__pycache__") and not file.parts[0].endswith((".dist-info", ".data", ".pth"))
    ]


def _folders(package: str) -> list[Path]:
    spec = find_spec(package)
    return [Path(each) for each in (spec.submodule_search_locations or ())] if spec is not None else []


def _untyped(packages: Iterable[str], typed: Iterable[str]) -> Iterator[str]:
    for package in sorted({*packages} - {*typed}):
        yield f"{package}/py.typed is missing, so type checkers ignore its annotations; add an empty file of that name"


def _astray(subject: Subject, files: list[PurePosixPath]) -> Iterator[str]:
    """Files that are not in a package of its own, one message for each top-level name."""
    tops = dict.fromkeys(file.parts[0] for file in files)
    owners = _owners(set(tops), subject)
    for top in tops:
        first = next(file for file in files if file.parts[0] == top)
        if top in owners:
            yield f"{first} lies in {top}, which is a package of {owners[top]}; move it into a package of its own"
        elif top.removesuffix(".py") in _EVERYBODYS:
            yield (
                f"{first} would lie beside the packages of all other projects; leave it out of the wheel, "
                'for example with packages = ["cosmos_…"] in [tool.hatch.build.targets.wheel]'
            )


def _owners(tops: set[str], subject: Subject) -> dict[str, str]:
    """The distribution, other than the subject, that each top-level name belongs to."""
    name = canonicalize_name(subject.name)
    # The core may be installed editable, so that its record names none of its files.
    owners = {"cosmos_core": CORE} if name != CORE else {}
    for dist in importlib.metadata.distributions():
        other = canonicalize_name(field(dist, "Name"))
        if other and other != name:
            owners |= {file.parts[0]: other for file in _recorded(dist) if file.parts[1:] == ("__init__.py",)}
    return {top: owners[top] for top in tops & owners.keys()}
