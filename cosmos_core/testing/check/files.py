"""Whether a distribution puts files only where they are its own, and types for those who use it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import Distribution
from typing import Final

from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugins.distributions import editable_folder, find_root, recorded_files
from cosmos_core.testing.check.ownership import astray
from cosmos_core.testing.check.subject import Subject, packages
from cosmos_core.testing.check.verdict import Check, Finding, faults

_INSTALLED_ONLY: Final = Finding(
    "note", "an editable installation lists no files; check the wheel, too: cosmos plugins check dist/NAME.whl"
)


def check_files(subject: Subject) -> Check:
    """What lies outside of its own packages, why installers refuse it, and packages without `py.typed`."""
    own = ", ".join(packages(subject.records))
    typing = dict.fromkeys(each for module in subject.modules for each in _untyped(module, subject))
    if subject.wheel is not None:
        return Check("files", f"{len(subject.wheel.files)}, in {own}", faults([*subject.wheel.faults, *typing]))
    try:
        if editable_folder(subject.distribution) is not None:
            return Check("files", own, (*faults(typing), _INSTALLED_ONLY))
        files = recorded_files(subject.distribution)
    except PluginBrokenError as error:
        return Check("files", own, faults([str(error), *typing]))
    found = faults([*astray(subject.distribution, files).values(), *typing])
    return Check("files", f"{len(files)}, in {own}", (*found, *_copy(subject.distribution, subject)))


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
