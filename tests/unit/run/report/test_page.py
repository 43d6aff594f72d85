import re

import attrs
import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.run.follower import Follower
from cosmos_core.run.report.page import _plots, write_report
from cosmos_core.run.report.plots import Series, plot, thin
from cosmos_core.run.report.summary import summarise
from cosmos_core.run.supervisor import Ending
from cosmos_core.types import Prompt


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


def test_the_report_is_one_page_with_curves_and_completions(write, finished):
    # The report is one page without anything from elsewhere.
    page = write(finished, outcome="finished")
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert not re.search(r'(?:src|href)\s*=\s*"(?!#)', page.replace("xlink:href", "href").replace('href="#', "#"))
    assert "prefers-color-scheme: dark" in page
    assert "&lt;script&gt;alert(0)&lt;/script&gt;" in page

    # The report has curves and completions.
    # That of the warm-up is another quantity.
    for title in ("Learning", "Staleness", "Throughput", "Loss of the warm-up", "Loss"):
        assert f"<h3>{title}</h3>" in page
    assert page.count("<svg") >= 4
    assert "held-out accuracy before" in page
    assert "row 0" in page
    assert "equal_rewards" in page

    # Ids of the plots do not collide.
    ids = re.findall(r'<(?:clipPath|path) id="([^"]+)"', page)
    assert ids
    assert len(ids) == len(set(ids))


def test_several_rewards_have_curves_of_their_own(job, finished):
    recipe = attrs.evolve(job.recipe, reward=(*job.recipe.reward, RewardConfig(plugin="length", name="brief")))
    follower = Follower()
    follower.fold(finished.entries)
    assert "Rewards" not in dict(_plots(job, follower))
    for timed in follower.steps:
        timed.record.rewards["brief"] = -0.5
    drawn = dict(_plots(attrs.evolve(job, recipe=recipe), follower))["Rewards"]
    assert "right" in drawn
    assert "brief" in drawn


def test_a_run_that_failed_at_once_has_a_report(write):
    page = write(None, outcome="failed", reason="no space left on device")
    assert "no space left on device" in page
    assert "No step was finished." in page


def test_a_plot_takes_the_colour_of_the_page_and_is_thin():
    # A plot takes the colour of the page and nothing draws nothing.
    svg = plot("one", [Series(label="a", points=[(0.0, 1.0), (1.0, 2.0)])], x_label="step", y_label="loss")
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert plot("two", [Series(label="a", points=[])], x_label="step", y_label="loss") == ""

    # Thinning keeps the mean and the range.
    points = [(float(x), float(x % 7)) for x in range(10_001)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert sum(y for _, y in thinned) / 100 == pytest.approx(sum(y for _, y in points) / len(points), rel=0.01)
    assert thin(points[:50], 100) == points[:50]
