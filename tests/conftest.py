"""Throw-away distributions, put on `sys.path` for one test. The profile of Hypothesis.

Properties are tested alike in each run; neither a busy machine nor a draw is a fault of what is tested.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributions import write_distribution

with contextlib.suppress(ModuleNotFoundError):  # vLLM's environment has none
    from hypothesis import settings

    settings.register_profile("tests", deadline=None, derandomize=True, database=None)
    settings.load_profile("tests")

# A shell has what it starts in the background ignore Ctrl-C, and so would all that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

MakeDistribution = Callable[..., Path]


@pytest.fixture
def make_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDistribution]:
    """Make `NAME-VERSION.dist-info` and modules in a folder of their own, and put it on `sys.path`."""
    known_modules = set(sys.modules)

    def make(name: str, **contents: Any) -> Path:
        folder = tmp_path / f"site-{name}"
        if folder.exists():  # the next case of a table
            shutil.rmtree(folder)
            _forget(folder, known_modules)
        write_distribution(folder, name, **contents)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield make
    _forget(tmp_path, known_modules)


def _forget(folder: Path, known_modules: set[str]) -> None:
    """Let the next import of what lies in a folder read it again."""
    for module in set(sys.modules) - known_modules:
        if str(folder) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]
