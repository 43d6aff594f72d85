"""Which run a command is for that names none, and which one a replica joins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_service_tools import runs
from cosmos_service_tools.joining import find_run

ADDRESS = "tcp://127.0.0.1:1"


def test_the_run_that_goes_on_is_found_unless_there_are_several(tmp_path, monkeypatch):
    alive = set()

    def load(directory):
        if directory.name == "broken":
            raise ConfigError("job.json: damaged")
        return directory

    monkeypatch.setattr(runs, "load_job", load)
    monkeypatch.setattr(runs, "find_address", lambda job: ADDRESS if job.name in alive else None)
    for name in ("a", "b", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").touch()
    with pytest.raises(ReplicaError, match=r"no run goes on .*; passed over: .*broken \(job\.json: damaged\)"):
        runs.only_run(tmp_path)
    alive.add("b")
    assert runs.only_run(tmp_path) == tmp_path / "b"
    alive.add("a")
    with pytest.raises(ReplicaError, match=r"several runs go on \(.*a, .*b\)"):
        runs.only_run(tmp_path)
    (tmp_path / "a" / "summary.json").write_text("{}")
    assert runs.only_run(tmp_path) == tmp_path / "b"

    # One is found by its controller's address, too.
    monkeypatch.setattr(runs, "announced", lambda job: None if job.name == "a" else SimpleNamespace(address=ADDRESS))
    assert find_run(ADDRESS, None, tmp_path) == (tmp_path / "b", ADDRESS)
    with pytest.raises(ConfigError, match=r"no run in .* has that address; .*passed over: .*broken \(job\.json"):
        find_run("tcp://127.0.0.1:9", None, tmp_path)
