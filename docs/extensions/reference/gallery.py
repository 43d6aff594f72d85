"""The directive `plugin-gallery`: the first-party plugins, from their projects' metadata and their own options."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from sphinx.application import Sphinx

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import KINDS
from cosmos_core.protocols.provider import Kind, entry_point_group
from cosmos_service_tools.card import Card, card
from cosmos_service_tools.reference import Key
from reference.markdown import directive, table

_ROOT: Final = Path(__file__).parents[3]


@attrs.frozen(kw_only=True)
class Entry:
    """One entry point of a distribution of this repository.

    Attributes:
        kind: What it plugs in.
        name: What users type.
        project: The `[project]` table of its distribution.
        folder: Where the distribution is, from the root of the repository.
        extra: The (first) extra that brings its requirements; empty if it needs none.
    """

    kind: Kind
    name: str
    project: Mapping[str, Any]
    folder: str
    extra: str


def setup(app: Sphinx) -> Mapping[str, bool]:
    """Register the directive."""
    app.add_directive("plugin-gallery", directive(lambda _: reference(), takes_argument=False))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def reference() -> str:
    """The whole gallery as Markdown, a section for each kind."""
    listed = list(entries())
    sections = []
    for kind in KINDS:
        of_kind = [_section(entry) for entry in listed if entry.kind == kind]
        if of_kind:
            sections += [f"## {kind.capitalize()}s", *of_kind]
    return "\n\n".join(sections)


def entries() -> Iterator[Entry]:
    """Every entry point of the core and of each project below `plugins/`."""
    for path in [_ROOT / "pyproject.toml", *sorted(_ROOT.glob("plugins/*/*/pyproject.toml"))]:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        folder = path.parent.relative_to(_ROOT).as_posix()
        for kind in KINDS:
            for name, value in project.get("entry-points", {}).get(entry_point_group(kind), {}).items():
                extra = value.partition("[")[2].rstrip("]").partition(",")[0]
                yield Entry(kind=kind, name=name, project=project, folder=folder, extra=extra)


def _section(entry: Entry) -> str:
    distribution = entry.project["name"]
    name = f"{distribution}:{entry.name}"
    made = card(PluginSet.load([(entry.kind, name)]), entry.kind, name)
    wanted = f'"{distribution}[{entry.extra}]"' if entry.extra else distribution
    about = "Comes with cosmos-core." if entry.folder == "." else f"{entry.project['description']} (`{entry.folder}`)"
    parts = [f"### `{entry.name}`", about, f"```console\n$ pip install {wanted}\n```", *_tables(made)]
    return "\n\n".join(parts)


def _tables(made: Card) -> Iterator[str]:
    options = [_row(key) for key in made.options]
    yield table(("option", "type", "default", "what"), options) if options else "It has no options."
    if made.capabilities:
        declared = [(f"`{each.name}`", each.value, each.meaning) for each in made.capabilities]
        yield table(("declares", "value", "which means"), declared)


def _row(key: Key) -> tuple[str, str, str, str]:
    bounds = f", {key.bounds}" if key.bounds else ""
    default = key.default if key.is_required else f"`{key.default}`"
    return f"`{key.name}`", f"{key.type}{bounds}", default, key.meaning
