"""Which run a replica joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError
from cosmos_service_tools import joining as finding
from cosmos_service_tools.joining import find_run

ADDRESS = "tcp://127.0.0.1:1"


def test_a_folder_that_cannot_be_read_keeps_nobody_from_another_run(tmp_path, monkeypatch):
    def told(directory: Path) -> str:
        if directory.name == "broken":
            raise ConfigError("job.json: damaged")
        return ADDRESS

    monkeypatch.setattr(finding, "_told_address", told)
    for name in ("broken", "fine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "controller.json").touch()
    assert find_run(ADDRESS, None, tmp_path) == (tmp_path / "fine", ADDRESS)
    with pytest.raises(ConfigError, match=r"no run in .* has that address; .*passed over: .*broken \(job\.json"):
        find_run("tcp://127.0.0.1:9", None, tmp_path)
