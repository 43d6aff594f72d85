import base64
import hashlib
import html
import json
import re
from types import SimpleNamespace

import attrs
import pytest

from cosmos_core.config.loading import save_job
from cosmos_core.config.schema import RewardConfig
from cosmos_core.observe.samples import SampleBrowser
from cosmos_core.run.follower import Follower
from cosmos_core.run.report import page as report
from cosmos_core.run.report.curves import Chart, Series
from cosmos_core.run.report.page import Comparison, _charts, _throughput, write_report
from cosmos_core.run.report.summary import summarise
from cosmos_core.run.supervisor import Ending
from cosmos_core.storage.parts import FOLDER
from cosmos_core.types import Prompt
from tests.kept_samples import group, keep, trained


class Numbers:
    def size(self, split):
        return 20 if split == "train" else 5

    def row(self, split, index):
        return Prompt(text=f"<script>alert({index})</script>", reference=str(index))


@pytest.fixture
def write(job):
    def write(history, **ending):
        follower = Follower()
        follower.fold(history.entries if history else ())
        summary = summarise(job, follower, Ending(**ending), wall_s=60.0)
        job.directory.mkdir()
        return write_report(job, follower, summary, Numbers()).read_text()

    return write


def drawn(page):
    """The data of each chart of a page, by its title."""
    cards = re.findall(r"<h3>(.*?)(?: <span.*?)?</h3><div class=\"plot\" data-chart='(.*?)'>", page)
    return {title: json.loads(html.unescape(data)) for title, data in cards}


def test_the_report_is_one_page_with_curves_and_completions(write, finished):
    # The report is one page without anything from elsewhere, and lets no script run but its own.
    page = write(finished, outcome="finished")
    assert page.startswith("<!doctype html>")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        f"content=\"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: 'self'; "
        "media-src data: 'self'\"" in page
    )
    assert "The MIT License" in script
    rest = page.replace(script, "")
    assert not re.search(r'(?:src|href)\s*=\s*"', rest)
    assert "prefers-color-scheme: dark" in page
    assert "&lt;script&gt;alert(0)&lt;/script&gt;" in page

    # The report has curves and completions. The loss of the warm-up is another quantity, and zoomed apart.
    charts = drawn(page)
    assert {"Learning", "Staleness", "Throughput", "Loss of the warm-up", "Loss"} <= charts.keys()
    assert charts["Loss of the warm-up"]["x"] != charts["Loss"]["x"] == "step"
    assert [line["label"] for line in charts["Learning"]["series"]] == ["reward", "held-out accuracy"]
    reward = charts["Learning"]["series"][0]
    assert len(reward["xs"]) == len(reward["ys"]) > 3
    assert "held-out accuracy before" in page
    assert "row 0" in page
    assert "equal_rewards" in page


def test_a_completion_is_green_where_its_reward_has_risen(write, finished, monkeypatch):
    def seen(*rewards):
        one, two = (SimpleNamespace(reward=reward, text="7", media="", detail="") for reward in rewards)
        return Comparison(prompt="3 + 4", reference="7", before=one, after=two)

    compared = [seen(0.0875, 0.5), seen(0.5, 0.0875), seen(0.5, 0.5), seen(None, 0.5)]
    monkeypatch.setattr(report, "_comparisons", lambda *_: compared)
    shown = re.findall(r'<span(?: class="(\w*)")?>reward (\S+)</span>', write(finished, outcome="finished"))
    assert shown[::2] == [("", "0.0875"), ("", "0.5"), ("", "0.5"), ("", "none")]
    assert shown[1::2] == [("good", "0.5"), ("bad", "0.0875"), ("", "0.5"), ("", "0.5")]


def test_the_throughput_of_two_sessions_is_no_line_across_the_pause(job, finished):
    follower = Follower()
    follower.fold(finished.entries)
    whole = _throughput(follower)[0].points
    middle = follower.steps[len(follower.steps) // 2].time
    ((first, last),) = follower.timeline.sessions
    follower.timeline.sessions[:] = [(first, middle - 1e-6), (middle, last)]
    chart = Chart(title="", series=_throughput(follower))
    assert [len([y for y in line["ys"] if y is None]) for line in chart.data["series"]] == [1, 1]
    assert len(whole) == len(chart.data["series"][0]["ys"])


def test_several_rewards_have_curves_of_their_own(job, finished):
    recipe = attrs.evolve(job.recipe, reward=(*job.recipe.reward, RewardConfig(plugin="length", name="brief")))
    follower = Follower()
    follower.fold(finished.entries)
    assert "Rewards" not in {chart.title for chart in _charts(job, follower, "accuracy")}
    for timed in follower.steps:
        timed.record.rewards["brief"] = -0.5
    charts = {chart.title: chart for chart in _charts(attrs.evolve(job, recipe=recipe), follower, "accuracy")}
    assert [line.label for line in charts["Rewards"].series] == ["right", "brief"]


def test_why_a_run_did_not_learn_is_told_before_its_figures(job, finished):
    follower = Follower()
    follower.fold(finished.entries)
    summary = summarise(job, follower, Ending(outcome="finished"), wall_s=60.0)
    job.directory.mkdir()
    page = write_report(job, follower, summary, Numbers()).read_text()
    assert "Why it may not learn" not in page
    finding = {"code": "equal", "text": "all <b>equal</b>", "advice": "change reward"}
    page = write_report(job, follower, {**summary, "findings": [finding]}, Numbers()).read_text()
    assert page.index("<b>equal</b>: all &lt;b&gt;equal&lt;/b&gt;; change reward") < page.index('class="tiles"')


def test_a_run_that_failed_at_once_has_a_report(write):
    page = write(None, outcome="failed", reason="no space left on device")
    assert "no space left on device" in page
    assert "No step was finished." in page


def test_what_cannot_be_drawn_is_left_out_and_a_line_keeps_its_colour():
    nan = float("nan")
    lines = [
        Series(label="none", points=[(1.0, nan)]),
        Series(label="</script>'", points=[(0.0, 0.0), (1.0, 1.23456789), (2.0, float("inf"))], marked=True),
    ]
    (line,) = Chart(title="", series=lines, logarithmic=True).data["series"]
    assert line == {"label": "</script>'", "marked": True, "colour": 1, "xs": (1.0,), "ys": (1.23457,)}
    assert Chart(title="", series=lines[:1]).data["series"] == []


def test_the_report_has_the_samples_or_says_why_not(job, monkeypatch):
    summary = summarise(job, Follower(), Ending(outcome="stopped"), wall_s=60.0)
    save_job(job)

    def page():
        return write_report(job, Follower(), summary, Numbers()).read_text()

    assert "no samples are kept yet: they come after the 3 steps of the warm-up, " in page()
    evil = "</script><script>alert(1)</script>"
    keep(job.directory, "samples", "rollout-0", [*group(1, 1.0, 0.0, text=evil), *group(2, 0.5)])
    keep(job.directory, "steps", "policy-0", [trained(1, 1, 1, 0.5, -0.5)])
    written = page()
    (data,) = re.findall(r'<script type="application/json" id="samples-data">(.*?)</script>', written, re.DOTALL)
    assert evil not in written
    found = json.loads(data)
    assert (sorted(each["lease"] for each in found["groups"]), found["total"]) == ([1, 2], 2)
    assert found["groups"][-1]["detail"]["samples"][0]["completion"] == evil
    (job.directory / FOLDER / "samples.rollout-1.1.parquet").write_bytes(b"PAR1")
    assert "cannot be read, and left out: samples.rollout-1.1.parquet" in page()
    # Whatever it is, the run has its report.
    monkeypatch.setattr(SampleBrowser, "embedded", lambda *_: {}["units"])
    assert "the samples cannot be shown: &#39;units&#39;" in page()
    monkeypatch.undo()
    for path in (job.directory / FOLDER).iterdir():
        path.unlink()
    monkeypatch.setattr("cosmos_core.run.report.page._MOST_OF_SAMPLES", 100)
    keep(job.directory, "samples", "rollout-0", group(1, 1.0))
    assert '<p class="soft">this page has no room for 1 of the chosen prompts</p>' in page()
