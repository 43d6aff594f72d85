import importlib.metadata
import logging

import pytest

from cosmos_core.plugins import compatibility
from cosmos_core.plugins.discovery import discover
from cosmos_core.testing.check import examination, probe
from cosmos_core.testing.check import examination as importing
from cosmos_core.testing.check.examination import Given
from cosmos_core.testing.check.probe import Import, Loaded
from cosmos_core.testing.check.recorder import Outcome
from cosmos_core.testing.check.subject import Subject

REWARD = """
from cosmos_core.protocols import Provider, hookimpl

@hookimpl
def cosmos_reward():
    return Provider(create=dict)
"""

LOADED, NOTHING, QUICK = Loaded(protocol=1), Given(), Import(seconds=0.1)


@pytest.fixture
def subject(make_distribution):
    make_distribution("acme-a", entries={"reward/a": "acme_a"}, modules={"acme_a.py": REWARD})
    records = [record for record in discover() if record.distribution == "acme-a"]
    return Subject(distribution=importlib.metadata.distribution("acme-a"), records=records)


@pytest.fixture
def judge(subject, monkeypatch):
    """Examine the subject, with the answers of other processes made up; gives (status, findings) of each check."""

    def examine(loaded=LOADED, outcomes=(), given=NOTHING, done=QUICK):
        monkeypatch.setattr("cosmos_core.testing.check.examination.ask_import", lambda *_: done)
        monkeypatch.setattr(examination, "ask_load", lambda *_: loaded)
        monkeypatch.setattr(examination, "run_generic", lambda *_: list(outcomes))
        verdict = examination.examine(subject, given, lambda _: None)
        return {check.name: (check.status, [each.text for each in check.findings]) for check in verdict.checks}

    return examine


def outcome(test, message="", plugin="acme-a:a"):
    result = "failed" if message else "passed"
    return Outcome(node=test, kind="reward" if plugin else "", plugin=plugin, test=test, result=result, message=message)


def test_a_deprecated_protocol_is_a_warning(judge):
    checks = judge(Loaded(protocol=1, deprecation="it was written for version 1"), [outcome("test_a")])
    assert checks["reward a, protocol"] == ("warning", ["it was written for version 1"])
    assert checks["reward a, kit"] == ("ok", [])


def test_the_probe_tells_of_a_deprecated_protocol(subject, monkeypatch):
    monkeypatch.setattr(compatibility, "PROTOCOL_VERSIONS", {"reward": 2})
    monkeypatch.setattr(compatibility, "DEPRECATED_PROTOCOLS", {"reward": {1: "9.0"}})
    logger = logging.getLogger("cosmos_core")
    level = logger.level
    try:
        assert "cosmos-core 9.0 will refuse" in probe._load("reward", "a").deprecation
    finally:
        logger.setLevel(level)


def test_what_tests_say_alike_is_one_fault(judge):
    outcomes = [outcome("test_a", "no engine"), outcome("test_b", "no engine"), outcome("test_c", "wrong")]
    assert judge(outcomes=outcomes)["reward a, kit"] == (
        "FAULT",
        ["test_a and 1 more: no engine", "test_c: wrong"],
    )


def test_what_the_options_told_is_not_told_by_the_kit(judge):
    checks = judge(Loaded(option_faults=("not frozen",)), [outcome("test_a", "not frozen"), outcome("test_b")])
    assert checks["reward a, options"] == ("FAULT", ["not frozen"])
    assert checks["reward a, kit"] == ("ok", [])


def test_a_module_that_fails_is_a_fault_of_the_kit(judge):
    checks = judge(outcomes=[outcome("test_module", "SyntaxError", plugin="")])
    assert checks["reward a, kit"] == ("FAULT", ["test_module: SyntaxError"])


def test_an_option_that_must_be_given_is_asked_for(judge):
    loaded = Loaded(protocol=1, required=("length",))
    status, (message,) = judge(loaded)["reward a, kit"]
    assert status == "not run"
    assert message.endswith("--set options.length=…")
    assert judge(loaded, [outcome("test_a")], Given(options={"length": 3}))["reward a, kit"] == ("ok", [])


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (Import(seconds=1.2), "takes 1.2 s to import, allowed is 1 s"),
        (Import(heavy=("torch",)), "acme_a imports torch; import it in the function that needs it"),
        (Import(processes=("sleep",)), "starts processes (sleep)"),
        (Import(error="ImportError: no"), "acme_a cannot be imported: ImportError: no"),
    ],
)
def test_an_import_that_costs_or_fails(judge, done, message):
    status, (text,) = judge(outcomes=[outcome("test_a")], done=done)["reward a, import"]
    assert status == "FAULT"
    assert message in text


@pytest.mark.parametrize(
    ("answers", "status", "summary"),
    [
        ([0.4], "ok", "0.40 s"),
        ([2.0, 0.5], "ok", "0.50 s"),
        ([2.0, 1.5, 0.9], "ok", "0.90 s"),
        ([2.0, 1.5, 1.2], "FAULT", "1.20 s"),
        ([1.2, 1.5, 2.0], "FAULT", "1.20 s"),
    ],
)
def test_the_fastest_of_three_imports_counts_and_one_within_the_bound_will_do(
    subject, monkeypatch, answers, status, summary
):
    left = [Import(seconds=each) for each in answers]
    monkeypatch.setattr(importing, "ask_import", lambda *_: left.pop(0))
    check = importing.check_import(subject.records[0], {})
    assert (check.status, check.summary, left) == (status, summary, [])


def test_an_import_that_fails_is_not_tried_again(subject, monkeypatch):
    left = [Import(error="ImportError: no"), Import()]
    monkeypatch.setattr(importing, "ask_import", lambda *_: left.pop(0))
    assert importing.check_import(subject.records[0], {}).status == "FAULT"
    assert len(left) == 1


def left_out(test, message="left out"):
    return Outcome(node=test, kind="reward", plugin="a", test=test, result="not run", message=message)


def test_what_is_left_of_the_kit_makes_the_check_incomplete(judge):
    outcomes = [outcome("test_a"), left_out("test_b"), left_out("test_c"), left_out("test_d", "skipped")]
    assert judge(outcomes=outcomes)["reward a, kit"] == (
        "not run",
        ["test_b and 1 more: left out", "test_d: skipped"],
    )


def test_a_module_that_fails_beside_a_complete_kit_is_a_warning(judge):
    broken = outcome("test_module", "SyntaxError", plugin="")
    assert judge(outcomes=[outcome("test_a"), broken])["reward a, kit"] == ("warning", ["test_module: SyntaxError"])
    checks = judge(outcomes=[outcome("test_a"), left_out("test_b"), broken])
    assert checks["reward a, kit"] == ("FAULT", ["test_module: SyntaxError", "test_b: left out"])
