"""Where a module lies, found as an import would find it, without importing the packages on the way."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePosixPath

import attrs


@attrs.frozen
class Root:
    """What of a module's path belongs to one project: its outermost regular package, or a module outside of any.

    Namespace packages round it are shared with other projects.

    Attributes:
        name: Its path as an installer records it, such as `acme/rewards`.
        path: Its folder or file.
    """

    name: PurePosixPath
    path: Path


def exists(module: str) -> bool:
    """Whether a module can be found."""
    return any(name == module for name, _ in _specs(module))


def find_root(module: str, path: Sequence[str] | None = None) -> Root | None:
    """The root of a module; None if it cannot be found in the file system.

    Args:
        module: Its name.
        path: Folders to look in; those of `sys.path` if not given.
    """
    for name, spec in _specs(module, path):
        # A namespace package has no file.
        if spec.origin is not None and spec.has_location:
            file, recorded = Path(spec.origin), PurePosixPath(*name.split("."))
            if spec.submodule_search_locations is not None:
                return Root(recorded, file.parent)
            return Root(recorded.with_name(file.name), file)
    return None


def _specs(module: str, path: Sequence[str] | None = None) -> Iterator[tuple[str, ModuleSpec]]:
    """Names and specs of the packages that a module is in, outermost first, and its own: as many as can be found."""
    parts = module.split(".")
    locations = path
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        spec = _find_spec(name, locations)
        if spec is None:
            return
        yield name, spec
        if spec.submodule_search_locations is None:
            return
        locations = [*spec.submodule_search_locations]


def _find_spec(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        # For a namespace package, `PathFinder` wants its parent imported, unless the name has none.
        asked = name.rpartition(".")[2] if finder is PathFinder else name
        try:
            spec = finder.find_spec(asked, locations)
        except (AttributeError, ImportError, KeyError, ValueError):
            continue
        if spec is not None:
            return spec
    return None
