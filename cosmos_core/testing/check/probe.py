"""A fresh process imports and loads a plugin for the check, whose own process imports none.

`python -m cosmos_core.testing.check.probe QUESTION ANSWER_FILE ARGUMENT…` writes its answer as JSON.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import attrs
import msgspec
import psutil

from cosmos_core.config.reference import keys
from cosmos_core.errors import CosmosError
from cosmos_core.plugins.compatibility import protocol_deprecation
from cosmos_core.plugins.discovery import PluginRecord, discover
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind
from cosmos_core.testing.conformance.plugin import option_faults

_HEAVY: Final = ("torch", "transformers", "vllm", "mlflow", "matplotlib", "tensorflow", "jax")


@attrs.frozen(kw_only=True)
class Import:
    """Costs and side effects of an import.

    Attributes:
        error: Why it failed; empty if it did not.
        seconds: How long it took.
        heavy: Heavy modules that it brought with it.
        threads: Names of threads that it started.
        processes: Names of processes that it started.
        printed: What it wrote to standard output and error.
    """

    error: str = ""
    seconds: float = 0.0
    heavy: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    printed: str = ""


@attrs.frozen(kw_only=True)
class Loaded:
    """A plugin as a run loads it.

    Attributes:
        error: Why it cannot be used; empty if it can.
        protocol: Its protocol version.
        deprecation: What is to be said of that version.
        num_options: How many options it has.
        required: Names of the options without a default.
        option_faults: What is wrong with its options class.
    """

    error: str = ""
    protocol: int = 0
    deprecation: str = ""
    num_options: int = 0
    required: tuple[str, ...] = ()
    option_faults: tuple[str, ...] = ()


def _records() -> list[PluginRecord]:
    """Every plugin that is found."""
    return discover()


def _import(module: str, *before: str) -> Import:
    """Import a module; what the core itself takes, and the modules of `before`, are imported first."""
    for each in before:
        importlib.import_module(each)
    known, threads = set(sys.modules), set(threading.enumerate())
    began = time.perf_counter()
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a plugin's code raises is the answer
        return Import(error=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - began
    return Import(
        seconds=seconds,
        heavy=tuple(name for name in _HEAVY if name in sys.modules and name not in known),
        threads=tuple(thread.name for thread in threading.enumerate() if thread not in threads),
        processes=tuple(child.name() for child in psutil.Process().children(recursive=True)),
    )


def _load(kind: str, selection: str) -> Loaded:
    """Load a plugin as a run does."""
    chosen = cast("Kind", kind)
    # The verdict tells of a deprecated protocol itself.
    logging.getLogger("cosmos_core").setLevel(logging.ERROR)
    try:
        provider = PluginSet.load([(chosen, selection)]).provider(chosen, selection)
    except CosmosError as error:
        return Loaded(error=str(error))
    options = keys(provider.options)
    return Loaded(
        protocol=provider.protocol,
        deprecation=protocol_deprecation(chosen, provider.protocol),
        num_options=len(options),
        required=tuple(key.name for key in options if key.is_required),
        option_faults=tuple(option_faults(provider.options)),
    )


_QUESTIONS: Final[Mapping[str, Callable[..., Any]]] = {"records": _records, "import": _import, "load": _load}


if __name__ == "__main__":
    question, file, *arguments = sys.argv[1:]
    Path(file).write_bytes(msgspec.json.encode(_QUESTIONS[question](*arguments)))
    # No thread of the plugin may hold up the answer.
    os._exit(0)
