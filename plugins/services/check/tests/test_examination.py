import importlib.metadata
import logging
import os
import sys

import attrs
import pytest

from cosmos_core.plugins import compatibility
from cosmos_core.plugins.discovery import discover
from cosmos_service_check import examination, probe
from cosmos_service_check.examination import Given
from cosmos_service_check.probe import Loaded
from cosmos_service_check.recorder import Outcome
from cosmos_service_check.subject import Subject
from cosmos_service_check.verdict import Check, Finding, Verdict, plain, text

REWARD = """
from cosmos_core.protocols import Provider, hookimpl

@hookimpl
def cosmos_reward():
    return Provider(create=dict)
"""

ENTRY_POINTS = "[cosmos_core.rewards]\na = acme_a\n"
NOTHING = Given()
LOADED = Loaded(protocol=1, seconds=0.1)


@pytest.fixture
def judge(make_distribution, monkeypatch):
    """Examine a subject, with the answers of other processes made up; gives (status, summary, findings) of a check."""
    make_distribution("acme-a", entries=ENTRY_POINTS, modules={"acme_a.py": REWARD})
    records = [record for record in discover() if record.distribution == "acme-a"]
    subject = Subject(distribution=importlib.metadata.distribution("acme-a"), records=records)

    def examine(check, *answers, outcomes=(), given=NOTHING):
        left = [*(answers or (LOADED,))]
        monkeypatch.setattr(examination, "load", lambda *_: left.pop(0))
        monkeypatch.setattr(examination, "run_kits", lambda *_: list(outcomes))
        verdict = examination.examine(subject, given, lambda _: None)
        assert left == []
        (found,) = [each for each in verdict.checks if each.name == f"reward a, {check}"]
        return found.status, found.summary, [each.text for each in found.findings]

    return examine


def outcome(test, message="", plugin="acme-a:a", result="failed"):
    result = result if message else "passed"
    return Outcome(kind="reward" if plugin else "", plugin=plugin, test=test, result=result, message=message)


def left_out(test, message="left out"):
    return outcome(test, message, plugin="a", result="not run")


GOOD, BROKEN = outcome("test_a"), outcome("test_module", "SyntaxError", plugin="")


def test_the_kit_is_judged_by_what_came_of_its_tests(judge):
    alike = [outcome("test_a", "no engine"), outcome("test_b", "no engine"), outcome("test_c", "wrong")]
    for outcomes, status, findings in [
        ([GOOD], "ok", []),
        # What tests say alike is one fault.
        (alike, "FAULT", ["test_a and 1 more: no engine", "test_c: wrong"]),
        # What is left out makes the check incomplete.
        (
            [GOOD, left_out("test_b"), left_out("test_c"), left_out("test_d", "skipped")],
            "not run",
            ["test_b and 1 more: left out", "test_d: skipped"],
        ),
        # A module that cannot be collected is another test where the kit is complete.
        ([BROKEN], "FAULT", ["test_module: SyntaxError"]),
        ([GOOD, BROKEN], "warning", ["test_module: SyntaxError"]),
        ([GOOD, left_out("test_b"), BROKEN], "FAULT", ["test_module: SyntaxError", "test_b: left out"]),
    ]:
        assert judge("kit", outcomes=outcomes)[::2] == (status, findings)


def test_an_option_that_must_be_given_is_asked_for(judge):
    loaded = Loaded(protocol=1, required=("length",))
    status, _, (message,) = judge("kit", loaded)
    assert status == "not run"
    assert message.endswith("--set options.length=…")
    assert judge("kit", loaded, outcomes=[GOOD], given=Given(options={"length": 3}))[0] == "ok"


COSTLY = """
import subprocess, threading, jax
print("hello")
threading.Thread(target=threading.Event().wait, name="waits", daemon=True).start()
subprocess.Popen(["sleep", "60"])
"""


def test_an_import_that_costs_or_fails(judge, make_distribution):
    folder = make_distribution("acme-a", entries=ENTRY_POINTS, modules={"acme_a.py": COSTLY, "jax.py": ""})
    (record,) = [record for record in discover() if record.distribution == "acme-a"]
    for loaded, messages in [
        (
            probe.load(record, {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}),
            [
                "acme_a imports jax; import it in the function that needs it",
                "importing acme_a starts threads (waits); start them when it is used",
                "importing acme_a starts processes (sleep); start them when it is used",
                "importing acme_a prints 'hello'; print nothing, or use logging",
            ],
        ),
        (Loaded(unimported="ImportError: no"), ["acme_a cannot be imported: ImportError: no"]),
    ]:
        status, _, said = judge("import", attrs.evolve(loaded, seconds=0.1), outcomes=[GOOD])
        assert (status, said) == ("FAULT", messages)


def test_the_fastest_of_three_imports_counts_and_one_within_the_bound_will_do(judge):
    for seconds, status, summary in [
        ([0.4], "ok", "0.40 s"),
        ([2.0, 0.5], "ok", "0.50 s"),
        ([2.0, 1.5, 0.9], "ok", "0.90 s"),
        ([2.0, 1.5, 1.2], "FAULT", "1.20 s"),
        ([1.2, 1.5, 2.0], "FAULT", "1.20 s"),
    ]:
        found = judge("import", *(Loaded(seconds=each) for each in seconds), outcomes=[GOOD])
        assert found[:2] == (status, summary), seconds
    assert "takes 1.2 s to import, allowed is 1 s" in found[2][0]


def test_a_deprecated_protocol_is_a_warning(judge, monkeypatch):
    monkeypatch.setattr(compatibility, "PROTOCOL_VERSIONS", {"reward": 2})
    monkeypatch.setattr(compatibility, "DEPRECATED_PROTOCOLS", {"reward": {1: "9.0"}})
    logger = logging.getLogger("cosmos_core")
    level = logger.level
    try:
        loaded = probe.load_here("reward", "a", "acme_a")
    finally:
        logger.setLevel(level)
    status, summary, (message,) = judge("protocol", loaded, outcomes=[GOOD])
    assert (status, summary) == ("warning", "version 1")
    assert "cosmos-core 9.0 will refuse" in message


FINE = Check("metadata", "Apache-2.0", (Finding("note", "a word"),))
WARNED = Check("reward short, protocol", "version 1", (Finding("warning", "old"),))
GAP = Check("reward short, kit", "", (Finding("not run", "give an option"),))
BAD = Check("files", "", (Finding("fault", "first\nsecond"), Finding("warning", "less"), Finding("fault", "other")))


def verdict(*checks):
    using = {"core": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "platform": "Linux x86_64"}
    return Verdict(
        distribution="acme 1.0", plugins=("reward short",), date="2026-01-02", environment=using, checks=checks
    )


PASTED = """\
acme 1.0: reward short

Checked 2026-01-02 with cosmos-core 0.1.0, Python 3.11.7, torch 2.13.0, Linux x86_64.

- ok       metadata: Apache-2.0
  - note: a word
- FAULT    files
  - fault: first
    second
  - warning: less
  - fault: other

FAILED: 2 faults"""


def test_a_verdict_is_a_list_to_paste_and_its_last_line_the_outcome():
    assert text(verdict(FINE, BAD)) == PASTED
    for checks, last in [
        ([FINE], "PASSED"),
        ([FINE, WARNED], "PASSED"),
        ([FINE, GAP], "INCOMPLETE: 1 check not run"),
        ([GAP, WARNED, GAP], "INCOMPLETE: 2 checks not run"),
        ([BAD, GAP], "FAILED: 2 faults"),
        ([Check("kit", "", (Finding("fault", "x"),))], "FAILED: 1 fault"),
    ]:
        assert text(verdict(*checks)).splitlines()[-1] == last
        assert last.startswith(plain(verdict(*checks))["outcome"])
    long = Check("kit", "", (Finding("fault", "\n".join(map(str, range(40)))),))
    assert "    … and 27 more lines" in text(verdict(long)).splitlines()
