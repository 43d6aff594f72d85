"""A run as `cosmos status` tells of it: from its controller, or from its journal where none is there."""

from __future__ import annotations

import json

import pytest

from cosmos_core.config.loading import save_job
from cosmos_core.controller.journal import Journal
from cosmos_core.errors import TransportError
from cosmos_core.run.following import observer
from cosmos_core.run.watching import look as looking
from cosmos_core.run.watching.look import look


@pytest.fixture
def stored(job, history, monkeypatch):
    """The folder of a run that has begun, of which `controller` is told."""
    history.join()
    job.directory.mkdir()
    save_job(job)
    with Journal(job.journal) as journal:
        for _, _, event in history.entries:
            journal.append(event)
        journal.commit()
    monkeypatch.setattr(looking, "person_key", lambda keys: None)
    return job.directory


def test_a_controller_that_does_not_answer_is_said_to(stored, monkeypatch):
    monkeypatch.setattr(looking, "find_address", lambda job: "tcp://127.0.0.1:9")
    monkeypatch.setattr(observer, "_ANSWER_S", 0.1)
    with pytest.raises(TransportError, match=r"the controller at tcp://127\.0\.0\.1:9 does not answer"):
        list(look(stored))


def test_without_a_controller_the_journal_tells(stored, monkeypatch):
    said = list(look(stored))
    assert said[0] == "demo: interrupted: its controller is gone; cosmos run --resume goes on"
    assert any(words.startswith("  policy-0: weights of step 0") for words in said)
    away = "its controller on node-7 does not answer"
    monkeypatch.setattr(looking, "absence", lambda job: away)
    assert next(look(stored)) == f"demo: interrupted: {away}; cosmos run --resume goes on"


def test_a_controller_tells_as_it_is(stored, history, monkeypatch):
    monkeypatch.setattr(looking, "find_address", lambda job: "tcp://127.0.0.1:9")
    monkeypatch.setattr(looking, "so_far", lambda *_, gauges: iter(history.entries))
    assert next(look(stored)) == "demo: running"


def test_a_run_that_its_supervisor_ended_is_not_told_as_interrupted(stored):
    ended = {"outcome": "failed", "steps": 3, "wall_s": 1.0, "reason": "rollout-0 was refused"}
    (stored / "summary.json").write_text(json.dumps(ended))
    said = list(look(stored))
    assert said[0] == "demo: failed"
    assert "rollout-0 was refused" in said
