"""Throw-away distributions: metadata and a module, put on `sys.path` for one test. The profile of Hypothesis.

Properties are tested alike in each run; neither a busy machine nor a draw is a fault of what is tested.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

with contextlib.suppress(ModuleNotFoundError):  # vLLM's environment has none
    from hypothesis import settings

    settings.register_profile("tests", deadline=None, derandomize=True, database=None)
    settings.load_profile("tests")

MakeDistribution = Callable[..., Path]


@pytest.fixture
def make_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDistribution]:
    """Make `NAME-VERSION.dist-info` and modules in a folder of their own, and put it on `sys.path`."""
    known_modules = set(sys.modules)

    def make(
        name: str,
        *,
        entries: Mapping[str, str] | str,
        modules: Mapping[str, str] | None = None,
        version: str = "1.0",
        requires: tuple[str, ...] = ("cosmos-core>=0.1",),
    ) -> Path:
        folder = tmp_path / f"site-{name}"
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
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield make
    for module in set(sys.modules) - known_modules:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def _entry_points(entries: Mapping[str, str]) -> str:
    """`{"reward/short": "module"}` as entry_points.txt."""
    lines = []
    for key, value in entries.items():
        kind, _, name = key.partition("/")
        lines += [f"[cosmos_core.{kind}s]", f"{name} = {value}"]
    return "\n".join(lines) + "\n"
