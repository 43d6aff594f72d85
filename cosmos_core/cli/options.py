"""Options that every command has."""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, here and in every process's log.")]

_VARIABLE: Final = "COSMOS_DEBUG"


def set_debugging(debug: bool) -> None:
    """Turn debugging on, if asked for: for this process and every one that it starts."""
    if debug:
        os.environ[_VARIABLE] = "1"


def is_debugging() -> bool:
    """True if tracebacks are wanted."""
    return os.environ.get(_VARIABLE) == "1"
