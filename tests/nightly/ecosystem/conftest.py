"""Releases as strangers get them: wheels of every distribution, and an environment that has nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.commandline import CommandLine
from tests.nightly.ecosystem.environment import CleanEnvironment
from tests.nightly.ecosystem.wheels import Wheelhouse

EXAMPLES = (
    "cosmos-algorithm-grpo",
    "cosmos-algorithm-sft",
    "cosmos-dataset-arithmetic",
    "cosmos-model-qwen",
    "cosmos-reward-math",
    "openai",  # which the package of an agent needs
)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Wheelhouse:
    """An sdist and a wheel of every distribution of this repository, checked by twine, for all of pytest's workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "wheels"
    with FileLock(f"{folder}.lock"):
        made = Wheelhouse(folder=folder)
        return made if made.constraints.exists() else Wheelhouse.build(folder)


@pytest.fixture(scope="session")
def clean(wheels: Wheelhouse) -> Iterator[CleanEnvironment]:
    """An environment with the check and what examples name; what a test adds, it removes."""
    with tempfile.TemporaryDirectory(prefix="cosmos-clean-") as folder:
        environment = CleanEnvironment.create(Path(folder), wheels)
        environment.pip("install", "cosmos-service-check", *EXAMPLES)
        yield environment
        left = CommandLine(environment.folder).left_behind()
        for process in left:
            process.kill()
        assert not left, f"processes left behind: {left}"
