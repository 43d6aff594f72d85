"""What lies in the folder where tests are run is not imported by the processes that they start."""

import pytest

from cosmos_core.protocols import DatasetContext
from cosmos_core.testing import CommandLine
from cosmos_core.testing.conformance.rows import read_elsewhere


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with modules of the names of others."""
    for name in ("queue.py", "cosmos_dataset_arithmetic.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the current folder')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_command_imports_nothing_from_its_folder(folder):
    assert "arithmetic" in CommandLine(folder)("plugins", "show", "arithmetic")


def test_the_process_of_the_dataset_kit_imports_nothing_from_the_folder(folder):
    rows = read_elsewhere("arithmetic", {}, DatasetContext(seed=0, directory=folder), [("train", 0)])
    assert set(rows) == {("train", 0)}
