"""What lies in the folder where tests are run is not imported by the processes that they start."""

from cosmos_core.protocols import DatasetContext
from cosmos_core.testing.conformance.dataset import read_elsewhere
from tests.commandline import CommandLine


def test_processes_import_nothing_from_the_current_folder(tmp_path, monkeypatch):
    for name in ("queue.py", "cosmos_dataset_arithmetic.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the current folder')\n")
    monkeypatch.chdir(tmp_path)
    assert "arithmetic" in CommandLine(tmp_path)("plugins", "show", "arithmetic")
    rows = read_elsewhere("arithmetic", {}, DatasetContext(seed=0, directory=tmp_path), [("train", 0)])
    assert set(rows) == {("train", 0)}
