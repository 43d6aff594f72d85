"""A fresh process imports and loads a plugin for the check, whose own process imports none.

`python -m cosmos_core.testing.check.probe ANSWER_FILE [KIND DISTRIBUTION:NAME MODULE]` writes its answer as JSON: a
`Loaded`, or the records of all plugins that are found.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final, cast

import attrs
import msgspec
import psutil

from cosmos_core.config.reference import keys
from cosmos_core.errors import CosmosError
from cosmos_core.plugins.compatibility import protocol_deprecation
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind
from cosmos_core.testing.conformance.plugin import option_faults

_HEAVY: Final = ("torch", "transformers", "vllm", "mlflow", "matplotlib", "tensorflow", "jax")
_MODELLING: Final = ("torch", "transformers", "cosmos_core.models")
"""What models and engines build on: its import is not theirs to answer for."""


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


def load(kind: str, selection: str, module: str) -> Loaded:
    """Import a plugin's module, and load the plugin as a run does."""
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
    chosen = cast("Kind", kind)
    # The verdict tells of a deprecated protocol itself.
    logging.getLogger("cosmos_core").setLevel(logging.ERROR)
    try:
        provider = PluginSet.load([(chosen, selection)]).provider(chosen, selection)
    except CosmosError as error:
        return attrs.evolve(imported, unusable=str(error))
    options = keys(provider.options)
    return attrs.evolve(
        imported,
        protocol=provider.protocol,
        deprecation=protocol_deprecation(chosen, provider.protocol),
        num_options=len(options),
        required=tuple(key.name for key in options if key.is_required),
        option_faults=tuple(option_faults(provider.options)),
    )


if __name__ == "__main__":
    file, *arguments = sys.argv[1:]
    Path(file).write_bytes(msgspec.json.encode(load(*arguments) if arguments else discover()))
    # No thread of the plugin may hold up the answer.
    os._exit(0)
