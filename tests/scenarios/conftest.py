"""Whole runs through the command line, each made once for all tests that look at it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commandline import CommandLine
from tests.distributions import write_distribution
from tests.processes import ForkedCommandLine
from tests.runs import AILING, WHIM


@pytest.fixture(scope="session")
def cosmos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """`cosmos` in a folder with modules that no process of a run may import, and a reward and an algorithm of tests."""
    folder = tmp_path_factory.mktemp("scenarios")
    for name in ("queue.py", "cosmos_algorithm_grpo.py"):
        (folder / name).write_text("raise SystemExit('imported from the current folder')\n")
    site = write_distribution(
        folder / "site",
        "test-plugins",
        entries={"reward/whim": "whim", "algorithm/ailing": "ailing"},
        modules={"whim.py": WHIM, "ailing.py": AILING},
    )
    command = ForkedCommandLine(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        yield command
    left = command.left_behind()
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session")
def runs(cosmos: CommandLine) -> Path:
    """The folder of all runs."""
    return cosmos.folder / "runs"
