"""The tutorial's package as its own workflow judges it. tests/nightly/ecosystem follows the whole page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_service_check.scaffold import new_package
from tests.nightly.ecosystem.follow import File, steps

PAGE = Path(__file__).parents[3] / "docs" / "plugins" / "tutorial.md"


@pytest.fixture
def package(tmp_path):
    """What the template makes, with the files that the page shows written over it."""
    folder = new_package("reward", "short-answer", into=tmp_path)
    shown = [step for step in steps(PAGE.read_text()) if isinstance(step, File)]
    assert shown
    for file in shown:
        assert (folder / file.path).exists(), file.path
        (folder / file.path).write_text(file.text)
    return folder


def test_ruff_has_nothing_to_say(package):
    for command in ["ruff check --no-cache .", "ruff format --no-cache --diff ."]:
        judge(package, command)


@pytest.mark.slow
def test_mypy_has_nothing_to_say(package):
    # Kept from run to run, together with that of the templates.
    judge(package, f"mypy --cache-dir={PAGE.parents[2] / '.mypy_cache' / 'templates'}")


def judge(package, command):
    environment = {**os.environ, "PYTHONPATH": str(package)}
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
