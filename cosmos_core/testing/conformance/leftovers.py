"""Processes that a worker started and did not end, found by a mark in their environment."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Final

import attrs
import psutil
import pytest

_MARK: Final = "COSMOS_CONFORMANCE_RUN"
_LEAVE_S: Final = 3.0


@attrs.define(kw_only=True, eq=False)
class Marked:
    """Workers that carry a mark.

    Attributes:
        leftovers: Command lines of what outlived them, once they are gone.
    """

    leftovers: tuple[str, ...] = ()


@contextlib.contextmanager
def marked(hash_seed: str) -> Iterator[Marked]:
    """Mark the workers that are started within, and end what they leave behind.

    Args:
        hash_seed: `PYTHONHASHSEED` of the workers.
    """
    mark, found = uuid.uuid4().hex, Marked()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_MARK, mark)
        patch.setenv("PYTHONHASHSEED", hash_seed)
        yield found
    found.leftovers = tuple(_ended(mark))


def _ended(mark: str) -> Iterator[str]:
    _, alive = psutil.wait_procs([each for each in psutil.process_iter() if _carries(each, mark)], timeout=_LEAVE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            name = " ".join(process.cmdline()) or process.name()
            process.kill()
            yield name


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
