"""A fresh process imports and loads a plugin for the check, whose own process imports none.

`python -m cosmos_core.testing.check.probe QUESTION ANSWER` reads `[kind, distribution:name, module]` and writes a
`Loaded`; asked `[]`, it writes the records of all plugins that are found.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar, cast

import attrs
import msgspec
import psutil

from cosmos_core.config.reference import keys
from cosmos_core.errors import CosmosError, PluginError
from cosmos_core.plugins.compatibility import protocol_deprecation
from cosmos_core.plugins.discovery import PluginRecord, discover
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind
from cosmos_core.testing.conformance.plugin import option_faults
from cosmos_core.testing.conformance.processes import exchange

T = TypeVar("T")
_HEAVY: Final = ("torch", "transformers", "vllm", "mlflow", "matplotlib", "tensorflow", "jax")
_MODELLING: Final = ("torch", "transformers", "cosmos_core.models")
"""What models and engines build on: its import is not theirs to answer for."""
_LONGEST_S: Final = 120.0


@attrs.frozen(kw_only=True)
class Loaded:
    """A plugin as a run loads it, and the heavy modules, threads, processes and output that its import brought.

    Attributes:
        unimported: Why it cannot be imported; empty if it can.
        unusable: Why it cannot be loaded; empty if it can.
        deprecation: Why its protocol version will be refused; empty if it will not.
        required: Names of the options without a default.
        option_faults: What is wrong with its options class.
    """

    unimported: str = ""
    seconds: float = 0.0
    heavy: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    printed: str = ""
    unusable: str = ""
    protocol: int = 0
    deprecation: str = ""
    num_options: int = 0
    required: tuple[str, ...] = ()
    option_faults: tuple[str, ...] = ()


def python_path(folder: Path) -> dict[str, str]:
    """Variables that put a folder before what is on the path already."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def records_in(folder: Path) -> list[PluginRecord]:
    """The plugins that are found with a folder first on the path."""
    return _ask([], python_path(folder), list[PluginRecord])[0]


def load(record: PluginRecord, environment: Mapping[str, str]) -> Loaded:
    """Import and load a plugin in a fresh process and return what that did; one that dies cannot be imported."""
    try:
        question = [record.kind, f"{record.distribution}:{record.name}", record.entry_point.module]
        answer, printed = _ask(question, environment, Loaded)
    except PluginError as error:
        return Loaded(unimported=str(error))
    return attrs.evolve(answer, printed=printed)


def _ask(question: Sequence[str], environment: Mapping[str, str], answer: type[T]) -> tuple[T, str]:
    """The answer of a fresh process, and what it printed."""
    with tempfile.TemporaryDirectory(prefix="cosmos-check-") as scratch:
        found, code, output = exchange(
            "cosmos_core.testing.check.probe",
            question,
            answer,
            timeout_s=_LONGEST_S,
            environment=environment,
            folder=Path(scratch),
        )
    printed = output.strip()
    if found is not None:
        return found, printed
    if code is None:
        raise PluginError(f"it did not end in {_LONGEST_S:.0f} s; import nothing that waits or loops")
    last = printed.splitlines()[-1] if printed else "it printed nothing"
    raise PluginError(f"the process ended with exit code {code}: {last}")


def load_here(kind: Kind, selection: str, module: str) -> Loaded:
    """Import a plugin's module in this process, and load the plugin as a run does."""
    for each in _MODELLING if kind in ("model", "engine") else ():
        importlib.import_module(each)
    known, threads = set(sys.modules), set(threading.enumerate())
    began = time.perf_counter()
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a plugin's code raises is the answer
        return Loaded(unimported=f"{type(error).__name__}: {error}")
    imported = Loaded(
        seconds=time.perf_counter() - began,
        heavy=tuple(name for name in _HEAVY if name in sys.modules and name not in known),
        threads=tuple(thread.name for thread in threading.enumerate() if thread not in threads),
        processes=tuple(child.name() for child in psutil.Process().children(recursive=True)),
    )
    # The verdict tells of a deprecated protocol itself.
    logging.getLogger("cosmos_core").setLevel(logging.ERROR)
    try:
        provider = PluginSet.load([(kind, selection)]).provider(kind, selection)
    except CosmosError as error:
        return attrs.evolve(imported, unusable=str(error))
    options = keys(provider.options)
    return attrs.evolve(
        imported,
        protocol=provider.protocol,
        deprecation=protocol_deprecation(kind, provider.protocol),
        num_options=len(options),
        required=tuple(key.name for key in options if key.is_required),
        option_faults=tuple(option_faults(provider.options)),
    )


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    question = msgspec.json.decode(asked.read_bytes(), type=list[str])
    found = load_here(cast("Kind", question[0]), *question[1:]) if question else discover()
    answered.write_bytes(msgspec.json.encode(found))
    # No thread of the plugin may hold up the answer.
    os._exit(0)
