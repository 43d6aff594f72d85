"""Runs side by side: the table, JSON and the page."""

import html
import json
import re

import pytest

from cosmos_core.errors import ConfigError
from cosmos_service_tools.comparison_page import thin

RECIPE = """
[run]
name = "{name}"
steps = 4
{warmup}
[algorithm]
plugin = "grpo"
[[reward]]
plugin = "math"
weight = {weight}
"""


def step(number, **figures):
    return {"kind": "step", "step": number, "time": 1.0, **{key.replace("__", "/"): v for key, v in figures.items()}}


@pytest.fixture
def run(here):
    """Write the folder of a run of two warm-up steps, if it has any, and four others, evaluated before and after."""

    def write(name, *, warmup=2, weight=1.0, has_metrics=True, summary=True, path=None, more=""):
        folder = here / (path or name)
        folder.mkdir(parents=True)
        (folder / "job.json").write_text("{}")
        table = f'[warmup]\nplugin = "sft"\nsteps = {warmup}' if warmup else ""
        written = RECIPE.format(name=name, warmup=table, weight=weight) + more
        (folder / "recipe.resolved.toml").write_text(written)
        rows = [step(number, train__loss=100.0 + number, train__wait_s=0.0) for number in range(1, warmup + 1)]
        rows += [
            step(number, train__loss=0.1 * number, reward__mean=weight * number, staleness__max=number)
            for number in range(warmup + 1, warmup + 5)
        ]
        rows += [
            {"kind": "evaluation", "step": number, "time": 1.0, "heldout/accuracy": accuracy}
            for number, accuracy in ((warmup, 0.25), (warmup + 4, 0.75))
        ]
        if has_metrics:
            (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        ended = {
            "outcome": "finished",
            "reason": "",
            "steps": warmup + 4,
            "planned_steps": warmup + 4,
            "wall_s": 61.2,
            "heldout_accuracy_before": 0.25,
            "heldout_accuracy_after": 0.75,
            "tokens_per_s": {"policy": 1234.4, "rollout": None},
            "samples": {"generated": 64, "consumed": 60, "dropped": {"stale": 4}},
        }
        if summary:
            (folder / "summary.json").write_text(json.dumps(ended))
            (folder / "report.html").write_text("")
        return folder

    return write


def charts(page):
    found = re.findall(r"<h3>(.*?)</h3><div class=\"plot\" data-chart='(.*?)'>", page)
    return {title: json.loads(html.unescape(data)) for title, data in found}


def test_runs_are_laid_side_by_side_in_a_table_and_on_a_page(cosmos, here, run):
    run("one")
    run("<b>two", weight=2.0, summary=False)
    said = cosmos("compare", "one", "<b>two")
    rows = {tuple(re.split(r"\s{2,}", line.strip())) for line in said.splitlines()}
    assert rows >= {
        ("outcome", "finished", "interrupted"),
        ("steps", "6 of 6", "6"),
        ("held-out accuracy", "0.25 → 0.75", "0.25 → 0.75"),
        ("reward", "3 → 6", "6 → 12"),
        ("units/s, policy", "1,234", "-"),
        ("samples dropped", "4", "-"),
        ("reward[math].weight", "1.0", "2.0"),
    }
    assert said.endswith("Curves: one/comparison.html\n")

    # The page has everything in it. What the warm-up measures is another quantity, and what is always 0 no curve.
    page = (here / "one/comparison.html").read_text()
    assert '<a href="report.html">one</a>' in page
    assert "<b>two" not in page
    drawn = charts(page)
    assert list(drawn)[:4] == ["Reward", "Held-out accuracy", "Loss", "Loss of the warm-up"]
    assert [line["ys"] for line in drawn["Reward"]["series"]] == [[3, 4, 5, 6], [6, 8, 10, 12]]
    assert [line["label"] for line in drawn["Reward"]["series"]] == ["one", "<b>two"]
    assert drawn["Loss"]["series"][0]["xs"] == [3, 4, 5, 6]
    assert drawn["Loss of the warm-up"]["series"][0]["ys"] == [101, 102]
    assert drawn["Held-out accuracy"]["series"][0]["xs"] == [2, 6]
    assert not any("wait_s" in title for title in drawn)

    # As JSON, a page is made where that is asked for alone.
    (here / "one/comparison.html").unlink()
    told = json.loads(cosmos("compare", "one", "<b>two", "--json"))
    assert told["runs"][0]["reward"] == [3.0, 6.0]
    assert told["runs"][1]["outcome"] == "interrupted"
    assert told["recipe"] == {"reward[math].weight": [1.0, 2.0]}
    assert not (here / "one/comparison.html").exists()


def test_runs_with_other_warmups_begin_together(cosmos, here, run):
    run("warm")
    run("warm", warmup=0, path="cold/warm")
    said = cosmos("compare", "warm", "cold/warm", "--output", "page.html")
    assert "cold/warm" in said
    assert re.search(r"warmup.steps +2 +-", said)
    drawn = charts((here / "page.html").read_text())
    assert [line["xs"] for line in drawn["Loss"]["series"]] == [[1, 2, 3, 4]] * 2
    assert drawn["Loss"]["x"] == "step after the warm-up"
    assert [line["colour"] for line in drawn["Loss of the warm-up"]["series"]] == [0]


def test_a_reward_that_one_run_has_is_a_row(cosmos, here, run):
    right = "weight = 1.0\ntimeout_s = {timeout}\n"
    own = '[[reward]]\nplugin = "plugins/4116882772cd/my.py:right"\n' + right
    for name, timeout in (("one", 10), ("two", 20)):
        run(name, more=own.format(timeout=timeout))
        summary = json.loads((here / name / "summary.json").read_text())
        summary |= {"heldout_reward_before": 0.25, "heldout_reward_after": 0.75}
        (here / name / "summary.json").write_text(json.dumps(summary))
    run("none")
    (here / "none/recipe.resolved.toml").write_text("reward = []\n")
    told = json.loads(cosmos("compare", "one", "two", "none", "--json"))["recipe"]
    rewards = [key for key in told if key.startswith("reward")]
    assert rewards == ["reward[math].plugin", "reward[right].plugin", "reward[right].timeout_s"]
    # Of a single reward of 0 and 1 the mean is the accuracy: it is told once.
    said = cosmos("compare", "one", "two")
    assert "held-out accuracy" in said
    assert "held-out reward" not in said
    # What rewards scored that were changed later is told by the summary alone, not by metrics.
    outdated = {"evaluations": [{"step": 2, "reward": 0.25, "outdated": {"reward.0.plugin": 3}}]}
    rescored = {key: value for key, value in summary.items() if "accuracy" not in key} | outdated
    (here / "two/summary.json").write_text(json.dumps(rescored | {"heldout_reward_before": None}))
    told = json.loads(cosmos("compare", "one", "two", "--json"))["runs"][1]
    assert (told["heldout_accuracy"], told["heldout_reward"]) == (None, [None, 0.75])


def test_what_cannot_be_compared_is_said(cosmos, here, run):
    # A run of an earlier release has no metrics.
    run("old", has_metrics=False)
    run("new")
    said = cosmos("compare", "old", "new")
    assert "old: no metrics.jsonl, so there are no curves; figures are those of summary.json." in said
    (line,) = charts((here / "old/comparison.html").read_text())["Reward"]["series"]
    assert (line["label"], line["colour"]) == ("new", 1)
    cosmos("compare", "old")
    assert "None of them has a curve." in (here / "old/comparison.html").read_text()

    for name in ("old/comparison.html", "page.html", "empty"):
        (here / name).unlink(missing_ok=True)
        (here / name).mkdir()
    (here / "new/recipe.resolved.toml").write_text("[run")
    for arguments, message in [
        (("empty",), r"empty: not the folder of a run \(it has no job.json\)"),
        (("new",), r"recipe.resolved.toml: cannot be read: TOMLDecodeError"),
        (("old", "--output", "old/job.json"), r"--output: old/job.json does not end in .html; give the page's file"),
        (("old",), r"^old: no comparison.html .*: Is a directory; give the page's file with --output FILE.html$"),
        (("old", "--output", "page.html"), r"^--output: page.html cannot be written: Is a directory$"),
        (("old", "--output", "gone/x.html"), r"--output: gone is no folder; make it, or choose another file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            cosmos("compare", *arguments)


def test_a_long_curve_is_thinned_and_keeps_its_mean():
    points = [(float(x), float(x % 7)) for x in range(10_001)]
    thinned = thin(points)
    assert len(thinned) == 2000
    assert sum(y for _, y in thinned) / 2000 == pytest.approx(sum(y for _, y in points) / len(points), rel=0.01)
    assert thin(points[:50]) == points[:50]
