"""Followers find their leader by a file."""

from __future__ import annotations

import threading

import pytest

from cosmos_core.errors import ReplicaError
from cosmos_core.policy.processes.bootstrap import Rendezvous, announce, find, rendezvous_file

HERE = Rendezvous(session="now", token="t", host="127.0.0.1", health_port=1, store=2)
EARLIER = Rendezvous(session="before", token="u", host="127.0.0.1", health_port=3, store=4)


def never():
    return False


def test_a_file_of_an_earlier_start_is_waited_out(tmp_path):
    path = rendezvous_file(tmp_path, "policy-0")
    assert path == tmp_path / "replicas" / "policy-0.json"
    announce(path, EARLIER)
    threading.Timer(0.2, announce, [path, HERE]).start()
    assert find(path, "now", 10.0, never) == HERE
    assert [each.name for each in path.parent.iterdir()] == ["policy-0.json"]
    # The token is for the owner alone.
    path.chmod(0o644)
    announce(path, HERE)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "'t'" not in repr(HERE)


def test_what_is_missing_or_cannot_be_written_is_said(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "replicas").write_text("a file")
    with pytest.raises(ReplicaError, match="where followers look for their leader"):
        announce(rendezvous_file(tmp_path / "other", "policy-0"), HERE)
    path = rendezvous_file(tmp_path, "policy-0")
    with pytest.raises(
        ReplicaError, match=r"has not written it within 0\.1 s \(there is none\); see logs/policy-0\.log"
    ):
        find(path, "now", 0.1, never)
    announce(path, EARLIER)
    with pytest.raises(ReplicaError, match="the one that is there is of an earlier start"):
        find(path, "now", 0.1, never)
    with pytest.raises(ReplicaError, match="told to stop while the leader was awaited"):
        find(path, "now", 10.0, lambda: True)
    path.write_text("{")
    with pytest.raises(ReplicaError, match="cannot be read"):
        find(path, "now", 10.0, never)
