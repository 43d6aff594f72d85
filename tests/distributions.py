"""Throw-away distributions: metadata and a module, in a folder for `sys.path`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_distribution(
    folder: Path,
    name: str,
    *,
    entries: Mapping[str, str] | str,
    modules: Mapping[str, str] | None = None,
    version: str = "1.0",
    requires: tuple[str, ...] = ("cosmos-core>=0.1",),
) -> Path:
    """Write `NAME-VERSION.dist-info` and modules into a folder.

    Args:
        folder: It is made.
        name: Of the distribution.
        entries: `{"reward/short": "module"}`, or the text of entry_points.txt.
        modules: Their sources, by their files.
        version: Of the distribution.
        requires: What it says that it needs.

    Returns:
        The folder.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n")
    text = entries if isinstance(entries, str) else _entry_points(entries)
    (info / "entry_points.txt").write_text(text)
    for file, source in (modules or {}).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return folder


def _entry_points(entries: Mapping[str, str]) -> str:
    """`{"reward/short": "module"}` as entry_points.txt."""
    lines = []
    for key, value in entries.items():
        kind, _, name = key.partition("/")
        lines += [f"[cosmos_core.{kind}s]", f"{name} = {value}"]
    return "\n".join(lines) + "\n"
