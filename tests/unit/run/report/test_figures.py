"""What of the rows was not used: in the summary, the terminal and the report."""

import io
import json

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.loading import load_job, save_job
from cosmos_core.protocols.dataset import Omission
from cosmos_core.run.follower import Follower
from cosmos_core.run.report.page import write_report
from cosmos_core.run.report.summary import print_summary, summarise, unused
from cosmos_core.run.supervisor import Ending

SHORT = Omission(reason="fewer than 4 characters", num_rows=3, first="train.jsonl:7: 2 characters")


@pytest.fixture
def follower(finished):
    follower = Follower()
    follower.fold(finished.entries)
    follower.state.evaluations.clear()
    for ledger in follower.state.ledgers:
        ledger.totals.dropped["bad_row"] = 2.0
    return follower


@pytest.fixture
def told(job, follower):
    """The job, as its processes read it, and its summary."""
    job.directory.mkdir()
    save_job(attrs.evolve(job, omitted={"train": (SHORT,), "heldout": ()}))
    read = load_job(job.directory)
    return read, summarise(read, follower, Ending(outcome="finished"), wall_s=1.0)


def test_the_summary_has_them_by_reason(told):
    _, summary = told
    assert summary["rows"] == {
        "train": 20,
        "heldout": 5,
        "left_out": {"train": {SHORT.reason: {"rows": 3, "first": SHORT.first}}, "heldout": {}},
        "imitation_dropped": {"bad_row": 4},
    }
    assert json.loads(json.dumps(summary)) == summary

    # A run that used all of them says nothing.
    job, _ = told
    plain = summarise(job, Follower(), Ending(outcome="finished"), wall_s=1.0)
    assert [label for label, _ in unused(plain)] == ["train rows left out"]
    whole = summarise(attrs.evolve(job, omitted={}), Follower(), Ending(outcome="finished"), wall_s=1.0)
    assert list(unused(whole)) == []

    # Of evaluations the last one counts.
    _, summary = told
    summary["evaluations"] = [
        {"loss": 1.0, "dropped": {"bad_row": 9}},
        {"loss": 0.5, "dropped": {"prompt_too_long": 1}},
    ]
    assert dict(unused(summary))["held-out rows dropped"] == {"prompt_too_long": 1}


def test_people_are_told_of_them(told, follower):
    job, summary = told
    summary["prompts"]["dropped"] = {"prompt_too_long": 1234}
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, job, console)
    shown = " ".join(console.file.getvalue().split())
    assert "prompts dropped 1,234 prompt_too_long" in shown
    assert f"train rows left out 3 {SHORT.reason}" in shown
    assert "demonstrations dropped 4 bad_row" in shown
    page = write_report(job, follower, summary, None).read_text()
    assert f'<td>train rows left out</td><td>{SHORT.reason}</td><td class="number">3</td>' in page
    assert '<td>prompts dropped</td><td>prompt_too_long</td><td class="number">1234</td>' in page
