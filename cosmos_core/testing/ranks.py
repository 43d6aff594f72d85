"""Ranks of an engine for tests: forked from a server that has torch and transformers imported, to start at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Final
from unittest import mock

import torch

from cosmos_core.rollout.embedded.ranks import process
from cosmos_core.rollout.embedded.ranks.follower import follow
from cosmos_core.testing.worlds import PRELOADED


class _Forked:
    """A forked process, as `subprocess` would have it."""

    def __init__(self, forked: BaseProcess) -> None:
        self._forked: Final = forked

    @property
    def pid(self) -> int | None:
        """Its number."""
        return self._forked.pid

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; subprocess.TimeoutExpired if it has none in time."""
        self._forked.join(timeout)
        code = self._forked.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return code

    def kill(self) -> None:
        """End it by force."""
        self._forked.kill()


@contextlib.contextmanager
def forked_ranks() -> Iterator[list[_Forked]]:
    """Inside, engines of several ranks fork them instead of starting an interpreter for each; yields those made."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    made: list[_Forked] = []

    def spawn(theirs: socket.socket) -> _Forked:
        forked = context.Process(target=_rank, args=(theirs,), daemon=True)
        forked.start()
        made.append(_Forked(forked))
        return made[-1]

    with mock.patch.object(process, "spawn", spawn):
        try:
            yield made
        finally:
            for each in made:
                each.kill()
                each.wait()


def _rank(connection: socket.socket) -> None:
    torch.set_num_threads(1)
    with connection:
        follow(connection)
