"""A fresh process imports and loads a plugin for the check, whose own process imports none.

`python -m cosmos_service_check.probe QUESTION ANSWER` reads `[kind, distribution:name, module]` and writes a
`Loaded`, both JSON.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, cast

import attrs
import msgspec
import psutil

from cosmos_core.config.structure import fields
from cosmos_core.errors import CosmosError
from cosmos_core.plugins.compatibility import protocol_deprecation
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind
from cosmos_core.testing import kit_of
from cosmos_core.testing.conformance.processes import exchange

_HEAVY: Final = ("torch", "transformers", "vllm", "mlflow", "matplotlib", "tensorflow", "jax")
_MODELLING: Final = ("torch", "transformers", "cosmos_core.models")
"""What models and engines build on: its import is not theirs to answer for."""
_LONGEST_S: Final = 120.0


@attrs.frozen(kw_only=True)
class Loaded:
    """A plugin as a run loads it.

    Attributes:
        unimported: Why it cannot be imported; empty if it can.
        seconds: Time that its import took.
        brought: What else its import should not have brought, each as a message for the author.
        unusable: Why it cannot be loaded; empty if it can.
        deprecation: Why its protocol version will be refused; empty if it will not.
        required: Names of the options without a default.
        kit: Name of the kit that proves it.
    """

    unimported: str = ""
    seconds: float = 0.0
    brought: tuple[str, ...] = ()
    unusable: str = ""
    protocol: int = 0
    deprecation: str = ""
    required: tuple[str, ...] = ()
    kit: str = ""


def load(record: PluginRecord, environment: Mapping[str, str]) -> Loaded:
    """Import and load a plugin in a fresh process and return what that did; one that dies cannot be imported."""
    module = record.entry_point.module
    question = [record.kind, f"{record.distribution}:{record.name}", module]
    found, code, output = exchange(
        "cosmos_service_check.probe", question, Loaded, timeout_s=_LONGEST_S, environment=environment
    )
    printed = output.strip().splitlines()
    if found is not None:
        told = [f"importing {module} prints {printed[0]!r}; print nothing, or use logging"] if printed else []
        return attrs.evolve(found, brought=(*found.brought, *told))
    if code is None:
        return Loaded(unimported=f"it did not end in {_LONGEST_S:.0f} s; import nothing that waits or loops")
    last = printed[-1] if printed else "it printed nothing"
    return Loaded(unimported=f"the process ended with exit code {code}: {last}")


def load_here(kind: Kind, selection: str, module: str) -> Loaded:
    """Import a plugin's module in this process, and load the plugin as a run does."""
    is_modelling = kind in ("model", "engine")
    for each in _MODELLING if is_modelling else ():
        importlib.import_module(each)
    known, threads = {*sys.modules, *(_HEAVY if is_modelling else ())}, {*threading.enumerate()}
    began = time.perf_counter()
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a plugin's code raises is the answer
        return Loaded(unimported=f"{type(error).__name__}: {error}")
    imported = Loaded(seconds=time.perf_counter() - began, brought=tuple(_brought(module, known, threads)))
    # The verdict tells of a deprecated protocol itself.
    logging.getLogger("cosmos_core").setLevel(logging.ERROR)
    try:
        provider = PluginSet.load([(kind, selection)]).provider(kind, selection)
    except CosmosError as error:
        return attrs.evolve(imported, unusable=str(error))
    return attrs.evolve(
        imported,
        protocol=provider.protocol,
        deprecation=protocol_deprecation(kind, provider.protocol),
        kit=kit_of(kind, provider.capabilities),
        required=tuple(
            name
            for name, each in fields(provider.options)
            if each.default is attrs.NOTHING or each.metadata.get("required")
        ),
    )


def _brought(module: str, known: set[str], threads: set[threading.Thread]) -> Iterator[str]:
    if heavy := [name for name in _HEAVY if name in sys.modules and name not in known]:
        yield f"{module} imports {', '.join(heavy)}; import it in the function that needs it"
    children = psutil.Process().children(recursive=True)
    for what, names in (
        ("threads", [thread.name for thread in threading.enumerate() if thread not in threads]),
        ("processes", [child.name() for child in children]),
    ):
        if names:
            yield f"importing {module} starts {what} ({', '.join(names)}); start them when it is used"


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    kind, *named = msgspec.json.decode(asked.read_bytes(), type=list[str])
    answered.write_bytes(msgspec.json.encode(load_here(cast("Kind", kind), *named)))
    # No thread of the plugin may hold up the answer.
    os._exit(0)
