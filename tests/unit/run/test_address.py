"""Whether a run's controller is there: here its process says so, elsewhere its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from cosmos_core.errors import ConfigError, TransportError
from cosmos_core.run import address as presence
from cosmos_core.run.address import absence, address_file, find_address, read_address, require_gone
from cosmos_core.transport.addresses import host_id

ADDRESS = "tcp://10.0.0.5:5551"


@pytest.fixture
def told(job):
    """Write what a controller would."""
    job.directory.mkdir()

    def told(**found):
        here = {"address": ADDRESS, "pid": os.getpid(), "host": host_id(), "term": 1}
        address_file(job).write_text(json.dumps(here | found))

    return told


@pytest.fixture
def answering(monkeypatch):
    """Controllers on other machines answer, or not, or refuse; who was asked."""

    def answering(answer):
        asked = []

        def answers(address, job):
            asked.append(address)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(presence, "_answers", answers)
        return asked

    return answering


def gone_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_on_this_machine_the_process_says_it(job, told, answering):
    asked = answering(False)
    told()
    assert find_address(job) == read_address(job) == ADDRESS
    with pytest.raises(ConfigError, match=f"running now .*{ADDRESS}"):
        require_gone(job)
    told(pid=gone_pid())
    assert find_address(job) is read_address(job) is None
    assert absence(job) == "its controller is gone"
    require_gone(job)
    assert asked == []

    # Nothing is left of before this machine was started.
    asked = answering(True)
    told(host=f"{host_id().partition('/')[0]}/another-boot")
    assert find_address(job) is read_address(job) is None
    assert asked == []


def test_a_process_of_another_machine_is_not_looked_for_here(job, told, answering):
    told(host="node-7/boot", pid=gone_pid())
    assert read_address(job) == ADDRESS
    answering(True)
    assert find_address(job) == ADDRESS
    with pytest.raises(ConfigError, match="running now"):
        require_gone(job)
    asked = answering(False)
    told(host="node-7/boot", pid=os.getpid())
    assert find_address(job) is None
    assert asked == [ADDRESS]
    assert absence(job).startswith(f"its controller on node-7 does not answer at {ADDRESS} within 5 s")
    require_gone(job)

    # What cannot be told is not taken for gone.
    told(host="node-7/boot")
    answering(TransportError("its key is another one"))
    with pytest.raises(ConfigError, match=r"cannot be told: its key is another one\. .* remove .*controller\.json"):
        require_gone(job)


def test_what_is_half_written_tells_of_none(job):
    assert find_address(job) is None
    job.directory.mkdir()
    for content in ["", "{", "[]", '{"address": "tcp://a:1", "pid": 1}']:
        address_file(job).write_text(content)
        assert find_address(job) is read_address(job) is None, content


def test_an_address_where_nobody_answers_is_given_up(job, monkeypatch):
    monkeypatch.setattr(presence, "person_key", lambda keys: None)
    monkeypatch.setattr(presence, "_ANSWER_S", 0.2)
    assert presence._answers("tcp://127.0.0.1:9", job) is False
