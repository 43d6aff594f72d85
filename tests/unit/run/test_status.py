"""A run as `cosmos status` tells of it: from its controller, or from its journal where none is there."""

from __future__ import annotations

import json

import pytest

from cosmos_core.config.loading import save_job
from cosmos_core.control.journal import Journal
from cosmos_core.control.machine.events import Commanded
from cosmos_core.errors import DamagedJournalError, TransportError
from cosmos_core.run import folder, observer, status
from cosmos_core.run.follower import Follower
from cosmos_core.run.status import look, settings_lines
from cosmos_core.transport.messages import REQUEST, Set
from cosmos_service_tools.auditor import audit_run


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
    monkeypatch.setattr(status, "person_key", lambda keys: None)
    return job.directory


def test_without_a_controller_the_journal_tells(stored, monkeypatch):
    said = list(look(stored))
    assert said[0] == "demo: interrupted: its controller is gone; cosmos run --resume goes on"
    assert said[1].startswith("0:00 interrupted | step 0/9")
    assert not any("policy-0" in words for words in said), "nobody runs it"
    away = "its controller on node-7 does not answer"
    monkeypatch.setattr(status, "absence", lambda job: away)
    assert next(look(stored)) == f"demo: interrupted: {away}; cosmos run --resume goes on"

    # A run that its supervisor ended is not told as interrupted.
    ended = {"outcome": "failed", "steps": 3, "wall_s": 1.0, "reason": "rollout-0 was refused"}
    (stored / "summary.json").write_text(json.dumps(ended))
    said = list(look(stored))
    assert said[0] == "demo: failed"
    assert " failed | step 0/9" in said[1]
    assert "rollout-0 was refused" in said


def test_a_controller_tells_as_it_is(stored, history, monkeypatch):
    monkeypatch.setattr(status, "find_address", lambda job: "tcp://127.0.0.1:9")

    def so_far(*_, gauges):
        gauges["policy-0"] = {"memory_bytes": 1.5 * 2**30, "mfu": 0.416}
        return iter(history.entries)

    monkeypatch.setattr(status, "so_far", so_far)
    told = list(look(stored))
    assert told[0] == "demo: running"
    assert any(
        words.startswith("  policy-0: ") and ", at most 1.5 GiB so far, MFU 42%, pid " in words for words in told
    )

    # A controller that does not answer is said to.
    monkeypatch.setattr(status, "so_far", observer.so_far)
    monkeypatch.setattr(observer, "_ANSWER_S", 0.1)
    with pytest.raises(TransportError, match=r"the controller at tcp://127\.0\.0\.1:9 does not answer"):
        list(look(stored))


def test_a_lost_journal_is_not_a_run_that_has_not_begun(stored, job):
    job.journal.unlink()
    assert list(look(stored)) == ["demo: not begun yet"]
    with folder.held(stored):
        assert list(look(stored)) == ["demo: starting"]
    job.recovery_snapshots.mkdir()
    (job.recovery_snapshots / "step-4").write_bytes(b"")
    for show in (lambda: list(look(stored)), lambda: audit_run(stored)):
        with pytest.raises(DamagedJournalError, match=r"it is gone, or empty.*cosmos recover"):
            show()


def test_a_setting_counts_from_the_first_step_that_goes_by_it(history):
    history.join()
    history.work(until=1)
    assert history.state.step == 1
    for value in ("0.25", "0.5"):
        asked = Set(overrides=(f"policy.optimizer.lr={value}",))
        history.append(Commanded(ident=value, request=REQUEST.encode(asked)))
    (before,) = {each.value for each in history.state.settings.dynamic if each.key == "policy.optimizer.lr"}
    assert list(settings_lines(history.state)) == [f"  policy.optimizer.lr = 0.5 from step 4 (recipe: {before})"]
    history.work(until=5)
    assert list(settings_lines(history.state)) == [f"  policy.optimizer.lr = 0.5 since step 4 (recipe: {before})"]
    follower, told = Follower(), []
    follower.fold(history.entries, lambda hook, **said: told.append((hook, said.get("step"))))
    assert {step for hook, step in told if hook == "cosmos_setting_changed"} == {4}
    back = Set(overrides=(f"policy.optimizer.lr={before}",))
    history.append(Commanded(ident="back", request=REQUEST.encode(back)))
    assert "from step" in next(settings_lines(history.state)), "the running step goes by the other value"
    history.work()
    assert list(settings_lines(history.state)) == []
