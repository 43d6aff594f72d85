"""Starts the probe and reads its answer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import attrs
import msgspec

from cosmos_core.errors import PluginError
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.testing.check.child import run
from cosmos_core.testing.check.probe import Import, Loaded

T = TypeVar("T")

_LONGEST_S: Final = 120.0
_MODELLING: Final = ("torch", "transformers", "cosmos_core.models")
"""What models and engines build on: its import is not theirs to answer for."""


def records_in(folder: Path) -> list[PluginRecord]:
    """The plugins that are found with a folder first on the path."""
    return _ask("records", python_path(folder), list[PluginRecord])[0]


def ask_import(record: PluginRecord, environment: Mapping[str, str]) -> Import:
    """What importing a plugin does.

    Raises:
        PluginError: The process died, or did not end.
    """
    before = _MODELLING if record.kind in ("model", "engine") else ()
    answer, printed = _ask("import", environment, Import, record.entry_point.module, *before)
    return attrs.evolve(answer, printed=printed)


def ask_load(record: PluginRecord, environment: Mapping[str, str]) -> Loaded:
    """What a plugin is, once loaded.

    Raises:
        PluginError: The process died, or did not end.
    """
    return _ask("load", environment, Loaded, record.kind, f"{record.distribution}:{record.name}")[0]


def python_path(folder: Path) -> dict[str, str]:
    """Variables that put a folder before what is on the path already."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _ask(question: str, environment: Mapping[str, str], answer: type[T], *arguments: str) -> tuple[T, str]:
    """The answer, and what the process printed."""
    with tempfile.TemporaryDirectory(prefix="cosmos-check-") as scratch:
        file = Path(scratch) / "answer.json"
        ended = run(
            "cosmos_core.testing.check.probe",
            [question, str(file), *arguments],
            folder=Path(scratch),
            environment=environment,
            timeout_s=_LONGEST_S,
        )
        printed = ended.output.strip()
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=answer), printed
        if ended.code is None:
            raise PluginError(f"it did not end in {_LONGEST_S:.0f} s; import nothing that waits or loops")
        last = printed.splitlines()[-1] if printed else "it printed nothing"
        raise PluginError(f"the process ended with exit code {ended.code}: {last}")
