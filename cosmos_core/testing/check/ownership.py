"""To whom top-level names belong: a distribution may put files into packages of its own only."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import all_suffixes
from importlib.metadata import Distribution
from pathlib import PurePosixPath

from packaging.utils import canonicalize_name

from cosmos_core.plugins.compatibility import CORE
from cosmos_core.plugins.discovery import entries
from cosmos_core.plugins.distributions import distributions, identity


def astray(dist: Distribution, files: Iterable[PurePosixPath]) -> dict[str, str]:
    """Top-level names that are not a distribution's own, each with a message: its own are those of its plugins.

    Args:
        dist: The distribution.
        files: What it installs among the packages of all others.
    """
    first: dict[str, PurePosixPath] = {}
    for file in files:
        first.setdefault(file.parts[0], file)
    values = [entry.value for entry in entries(dist.read_text("entry_points.txt") or "")]
    own = dict.fromkeys(value.partition(":")[0].partition(".")[0].strip() for value in values)
    owners = _owners(identity(dist).name, {top.partition(".")[0] for top in first})
    found = {}
    for top, file in first.items():
        name = top.partition(".")[0]
        if name in owners:
            found[top] = f"{file} lies in {name}, which belongs to {owners[name]}; move it into a package of its own"
        elif name not in own or not _is_code(file):
            packages = ", ".join(f'"{each}"' for each in own)
            found[top] = (
                f"{file} would lie beside the packages of all other projects; leave it out of the wheel, "
                f"for example with packages = [{packages}] in [tool.hatch.build.targets.wheel]"
            )
    return found


def _owners(name: str, tops: Iterable[str]) -> dict[str, str]:
    """The distribution, other than the one of that name, that each package and module belongs to, if one does."""
    owners = {top: "Python" for top in tops if top in sys.stdlib_module_names}
    ours = canonicalize_name(name)
    if ours != CORE:
        # The core may be installed editable, so that its record names none of its files.
        owners["cosmos_core"] = CORE
    for dist in distributions():
        other = canonicalize_name(identity(dist).name)
        if other and other != ours:
            # Searched, not parsed: some records have tens of thousands of rows.
            record = "\n" + (dist.read_text("RECORD") or "")
            owners |= {top: other for top in tops if _claims(record, top)}
    return owners


def _claims(record: str, top: str) -> bool:
    """Whether a record has a regular package or a module; namespace packages are everybody's."""
    return f"\n{top}/__init__.py," in record or f"\n{top}.py," in record


def _is_code(file: PurePosixPath) -> bool:
    """Whether a file is in a folder or a module; others, such as `.pth`, belong to nobody's package."""
    return len(file.parts) > 1 or file.name.endswith((*all_suffixes(), ".pyi"))
