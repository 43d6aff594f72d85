"""What the end of a run says of videos, and of evaluations that scored nothing."""

import io
import re

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.job import StageFacts
from cosmos_core.run.follower import Follower, evaluation_metrics
from cosmos_core.run.report.page import write_report
from cosmos_core.run.report.summary import print_summary, summarise
from cosmos_core.run.supervisor import Ending
from cosmos_core.types import Prompt

OF_TEXT = re.compile(r"accuracy|tokens?\b|tok/s|perplexity|[Cc]ompletion")


class Rows:
    def row(self, split, index):
        return Prompt(text=f"a red square {index}")


@pytest.fixture
def told(open_history):
    """Follows a whole run; its summary, what is printed, and its report."""

    def tell(job, unscored=False):
        history = open_history(job)
        history.join(roles=("policy", "rollout") if job.uses_rollouts else ("policy",))
        history.work()
        history.end()
        follower = Follower()
        follower.fold(history.entries)
        if unscored:
            done = follower.state.evaluations
            done[:] = [attrs.evolve(each, accuracy=None, reward=None, num_unscored=each.num_prompts) for each in done]
        summary = summarise(job, follower, Ending(outcome="finished"), wall_s=79.0)
        console = Console(file=io.StringIO(), width=200)
        print_summary(summary, job, console)
        job.directory.mkdir(exist_ok=True)
        page = write_report(job, follower, summary, Rows()).read_text().partition("recipe.resolved.toml")[0]
        return follower, summary, " ".join(console.file.getvalue().split()), page

    return tell


def test_an_evaluation_that_scored_nothing_is_told_as_not_measured(job, told):
    for unit, score in (("token", "accuracy"), ("denoising step", "reward")):
        _, summary, shown, page = told(attrs.evolve(job, unit=unit), unscored=True)
        assert summary[f"heldout_{score}_before"] is summary[f"heldout_{score}_after"] is None
        assert [each[score] for each in summary["evaluations"]] == [None] * len(summary["evaluations"])
        words = "not measured before (5 of 5 unscored) → not measured after (5 of 5 unscored)"
        assert f"held-out {score} {words}" in shown
        not_measured = re.findall(r"<b>not measured</b><span>held-out (\w+ \w+) \(5 of 5 unscored\)<", page)
        assert not_measured == [f"{score} before", f"{score} after"]


def test_what_is_said_of_videos_is_not_said_of_text(job, told):
    follower, summary, shown, page = told(attrs.evolve(job, unit="denoising step"))
    rewards = [done.reward for done in follower.evaluations]
    assert (summary["heldout_reward_before"], summary["heldout_reward_after"]) == (rewards[0], rewards[-1])
    assert f"held-out reward {rewards[0]:.3f} before (1 of 5 unscored) → {rewards[-1]:.3f} after (1 of" in shown
    assert set(summary["denoising_steps_per_s"]) == {"policy", "rollout"}
    assert not [key for key in summary if OF_TEXT.search(key)]
    for text in (shown, re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)):
        assert not OF_TEXT.search(text)
    assert "No evaluation generated any" not in page
    for words in ("held-out reward before", "Samples of held-out prompts", "denoising steps/s"):
        assert words in page


def test_a_squared_error_has_no_perplexity(job, told):
    recipe = attrs.evolve(job.recipe, reward=(), warmup=None)
    facts = (StageFacts(source="demonstrations"),)
    alone = attrs.evolve(
        job, recipe=recipe, stages=facts, uses_rollouts=False, num_measured_prompts=5, unit="denoising step"
    )
    follower, summary, shown, page = told(alone)
    assert (summary["heldout_loss_before"], summary["heldout_reward_before"]) == (1.0, None)
    assert "9 denoising steps" in shown
    assert not [key for each in (summary, *summary["evaluations"]) for key in each if "perplexity" in key]
    assert "perplexity" not in shown + page
    assert "No evaluation generated any" in page
    record = follower.evaluations[0]
    assert "heldout/perplexity" in evaluation_metrics(record, "token")
    assert "heldout/perplexity" not in evaluation_metrics(record, "denoising step")

    # Seconds of requests at the same time are no share of the pool.
    _, summary, _, page = told(job)
    (row,) = re.findall(r"<tr><td>scoring.*?</tr>", page)
    assert "scoring (summed over concurrent requests)" in row
    assert f"{summary['planes']['rollout']['scoring (summed over concurrent requests)']:.1f}" in row
    assert "%" not in row
