import io
import json
import math
from types import SimpleNamespace

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.job import StageFacts
from cosmos_core.control.machine.events import Commanded, ControllerStarted, Recovered, Reported
from cosmos_core.control.machine.records import SampleCounts
from cosmos_core.control.machine.recovery import RECOVERY_SNAPSHOT, snapshot_of
from cosmos_core.control.machine.settings import settings_of
from cosmos_core.run.follower import Follower
from cosmos_core.run.report.page import write_report
from cosmos_core.run.report.summary import UNUSED, print_summary, summarise
from cosmos_core.run.supervisor import Ending
from cosmos_core.transport.messages import REQUEST, Set
from cosmos_core.transport.reports import REPORT, GroupFinished, WeightsLoaded
from cosmos_core.types import Prompt


@pytest.fixture
def follower(finished):
    follower = Follower()
    follower.fold(finished.entries)
    return follower


@pytest.fixture
def summary(job, follower):
    return summarise(job, follower, Ending(outcome="finished"), wall_s=12.5)


def test_what_happened_is_told(summary, finished, follower):
    evaluations = finished.state.evaluations
    assert summary["heldout_accuracy_before"] == evaluations[0].accuracy
    assert summary["heldout_accuracy_after"] == evaluations[-1].accuracy
    assert (summary["steps"], summary["planned_steps"], summary["wall_s"]) == (9, 9, 12.5)
    assert summary["staleness"]["max"] == max(step.staleness_max for step in finished.state.steps)
    assert summary["problems"]["reward_failed"] == "ValueError: no number"
    assert [(stage["algorithm"], stage["steps"]) for stage in summary["stages"]] == [("sft", 3), ("grpo", 6)]
    assert all(stage["seconds"] > 0 for stage in summary["stages"])
    assert summary["checkpoints"]["9"] == "checkpoints/step-9"
    assert json.loads(json.dumps(summary)) == summary
    # Each pool has its rate, however short the run was.
    assert all(summary["tokens_per_s"].values())

    # Every generated sample is accounted for.
    samples = summary["samples"]
    assert samples["consumed"] == sum(step.num_samples for step in finished.state.steps if step.reward is not None)
    assert samples["generated"] == samples["consumed"] + sum(samples["dropped"].values())
    assert samples["dropped"]["equal_rewards"] > 0
    assert samples["dropped"]["reward_failed"] > 0
    assert samples["dropped"].get(UNUSED, 0) >= 0
    units = sum(each.units for each in (ledger.samples for ledger in finished.state.ledgers))
    assert 0 < samples["wasted_units"] < samples["units"] == units
    generation_s = summary["planes"]["rollout"]["generation"]
    assert samples["wasted_s"] == pytest.approx(generation_s * samples["wasted_units"] / follower.generated, abs=1e-3)


def test_what_was_dropped_as_stale_is_told_with_its_length(job, summary):
    counts = SampleCounts(generated=10, consumed=6, units=150)
    counts.drop("equal rewards", 2, 30)
    counts.drop("stale", 1, 60)
    samples = {"generated": 10, "consumed": 6, "dropped": counts.dropped, "units": 150}
    samples |= {"trained": 6, "wasted_units": counts.wasted, "stale_units": counts.stale, "wasted_s": 1.0}
    words = "10.0% of samples dropped as stale, of 60 tokens each; those consumed have 10"
    assert words in " ".join(print_({**summary, "samples": samples}, job).split())
    assert "dropped as stale" not in print_(summary, job)


def test_sessions_and_loads_are_counted(job, follower):
    # What replicas loaded from one another is counted.
    nothing, rest = {"spared_bytes": 0, "delta_loads": 0}, {"relayed_bytes": 50, "spared_bytes": 60, "delta_loads": 1}
    alone = summarise(job, follower, Ending(outcome="finished"), wall_s=1.0)["weights"]
    number = alone["loads"]
    assert number
    assert alone == {"loads": number, "bytes": number, "relayed_bytes": 0, **nothing}
    follower.loads.update(loads=1, bytes=70, relayed_bytes=50, spared_bytes=60, delta_loads=1)
    more = summarise(job, follower, Ending(outcome="finished"), wall_s=1.0)["weights"]
    assert more == {"loads": alone["loads"] + 1, "bytes": alone["bytes"] + 70, **rest}


def test_where_the_time_went_is_told_of_all_sessions_and_processes(job, history):
    history.join()
    history.work(until=5)
    history.lose("rollout-0", "killed")
    history.fakes["rollout-0"].end()
    history.join(roles=("rollout",))
    history.work(until=6)
    num_first = len(history.entries)
    history.resume(4)
    history.join(step=4)
    history.work()
    history.end()
    away_s = 3600.0
    follower = Follower()
    follower.fold((number, time + away_s * (number > num_first), event) for number, time, event in history.entries)
    found = summarise(job, follower, Ending(outcome="finished"), wall_s=9.0)["planes"]

    told = [event for _, _, event in history.entries if isinstance(event, Reported)]
    reports = [(event.incarnation, REPORT.decode(event.report)) for event in told]
    busy = {by: report.busy_s for by, report in reports if isinstance(report, GroupFinished)}
    loads = [report for _, report in reports if isinstance(report, WeightsLoaded)]
    assert len(busy) == 3
    rollout = found["rollout"]
    assert rollout["generation"] == sum(busy.values())
    assert rollout["scoring (summed over concurrent requests)"] == 2 * rollout["generation"]
    num_groups = sum(isinstance(report, GroupFinished) for _, report in reports)
    assert rollout["waiting for scores"] == round(2.0**-8 * num_groups, 3)
    present_s = sum(rollout[name] for name in ("generation", "paused for weights", "waiting for scores"))
    assert rollout["waiting for prompts"] + rollout["idle in the warm-up"] + present_s < len(history.entries)
    assert (rollout["weight load"], rollout["paused for weights"]) == (0.25 * len(loads), 0.125 * len(loads))
    assert 0.0 < rollout["waiting for prompts"] < len(history.entries), "an entry a second, and none while it was away"
    first_main = next(
        time
        for _, time, event in history.entries
        if isinstance(event, Reported) and isinstance(REPORT.decode(event.report), GroupFinished)
    )
    warm_s = rollout["idle in the warm-up"]
    assert 0.0 < warm_s < first_main - history.entries[0][1], "no prompts are given out in it"
    assert rollout["waiting for prompts"] + warm_s < len(history.entries)
    assert found["policy"]["waiting for samples"] == 0.5 * (6 + 5), "steps 5 and 6 were undone, and took their time"


def test_a_run_without_steps_or_times_has_a_summary_as_well(job, finished):
    # A run that never began has a summary as well.
    ending = Ending(outcome="failed", reason="the controller could not start")
    summary = summarise(job, Follower(), ending, wall_s=1.0)
    assert (summary["outcome"], summary["steps"], summary["heldout_accuracy_after"]) == ("failed", 0, None)
    nothing = dict.fromkeys(("generated", "consumed", "trained", "units", "wasted_units", "stale_units", "wasted_s"), 0)
    assert summary["samples"] == {**nothing, "dropped": {}}
    assert print_(summary, job).count("the controller could not start") == 1
    # What a recovered run took to start and to end is not known.
    snapshot = RECOVERY_SNAPSHOT.encode(snapshot_of(finished.state, max(finished.state.marks)))
    follower = Follower()
    follower.fold([(1, 2000.0, Recovered(snapshot=snapshot, checkpoint="c")), (2, 2001.0, ControllerStarted(term=9))])
    summary = summarise(job, follower, Ending(outcome="stopped"), wall_s=1000.0)
    assert summary["running_s"] is None
    shown = print_({**summary, "planes": {"policy": {"training": 1.0}}}, job)
    assert "steps in 16:40\n" in shown
    assert "Where the time went since the recovery (s)" in " ".join(shown.split())


def test_why_a_run_did_not_learn_is_told_at_its_end(job, follower, summary):
    assert summary["findings"] == []
    assert summary["samples"]["trained"] == summary["samples"]["consumed"]
    state = follower.state
    state.steps = [attrs.evolve(each, equal={1.0: each.num_groups}) for each in state.steps]
    summary = summarise(job, follower, Ending(outcome="finished"), wall_s=12.5)
    (found,) = summary["findings"]
    assert (found["code"], found["text"].startswith("all rewards are equal in 100%")) == ("equal", True)
    assert f"equal: {found['text']}; {found['advice']}" in " ".join(print_(summary, job).split())


def test_the_end_is_printed_with_before_after_planes_and_files(summary, job):
    shown = print_(summary, job)
    before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
    assert f"{before:.3f} before (1 of 5 unscored) → {after:.3f} after (1 of 5 unscored)" in shown
    for word in ("generation", "weight load", "equal_rewards", "summary.json", "report.html", "cosmos export"):
        assert word in shown

    # What starting and ending took is told apart.
    assert summary["running_s"] > 0.0
    told = print_({**summary, "running_s": 20.0, "wall_s": 46.0}, job)
    assert "after 9 of 9 steps in 0:20; 0:46 with starting and ending" in told
    assert "steps in 0:20\n" in print_({**summary, "running_s": 19.5, "wall_s": 20.0}, job)

    # What an error says is no markup.
    summary = {**summary, "problems": {"generation": "[/gloo/pair.cc:537] Connection reset by peer"}}
    assert "[/gloo/pair.cc:537] Connection reset" in print_(summary, job)


def test_a_setting_is_told_with_the_first_step_that_goes_by_it(job, history):
    history.join()
    asked = Set(overrides=("policy.optimizer.lr=0.25",))
    history.append(Commanded(ident="one", request=REQUEST.encode(asked)))
    follower = Follower()
    follower.fold(history.entries)
    summary = summarise(job, follower, Ending(outcome="stopped"), wall_s=1.0)
    assert [change["step"] for change in summary["settings"]] == [4]
    assert "→ 0.25 from step 4 on" in print_(summary, job)


def test_what_was_scored_by_other_rewards_does_not_compare(job, history):
    history.join()
    history.work(until=7)
    (reward,) = job.recipe.reward
    changed = attrs.evolve(reward, weight=2.0, timeout_s=1.0)
    history.settings = settings_of(attrs.evolve(job, recipe=attrs.evolve(job.recipe, reward=(changed,))))
    history.resume(4)
    history.join(step=4)
    follower = Follower()
    follower.fold(history.entries)
    summary = summarise(job, follower, Ending(outcome="stopped"), wall_s=1.0)
    assert "not comparable before (reward.0.weight changed at step 5) → not measured after" in print_(summary, job)

    history.work(until=7)
    history.stop()
    history.work()
    history.end()
    follower.fold(history.entries)
    follower.state.evaluations[-1] = attrs.evolve(follower.state.evaluations[-1], accuracy=0.5, num_unscored=2)
    summary = summarise(job, follower, Ending(outcome="stopped"), wall_s=1.0)
    assert (summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]) == (None, 0.5)
    assert [each.get("outdated") for each in summary["evaluations"]] == [{"reward.0.weight": 5}, None]
    words = "(reward.0.weight changed at step 5) → 0.500 after (at step 6; 2 of 5 unscored)"
    assert f"not comparable before {words}" in print_(summary, job)
    job.directory.mkdir()
    rows = SimpleNamespace(row=lambda *_: Prompt(text="3 + 4", reference="7"))
    page = write_report(job, follower, summary, rows).read_text()
    assert "<th>before (step 6)</th>" in page, "what old rewards made of a completion is not compared either"
    for label in ("before (reward.0.weight changed at step 5)", "after (at step 6; 2 of 5 unscored)"):
        assert f"held-out accuracy {label}</span>" in page

    # A run that goes on from before the change goes by the new rewards from there on.
    history.state.evaluations[0] = attrs.evolve(history.state.evaluations[0], outdated={"reward.0.weight": 9})
    history.resume(4)
    assert [done.outdated for done in history.state.evaluations] == [{"reward.0.weight": 5}]


def test_what_is_next_is_what_goes_on(job):
    summary = summarise(job, Follower(), Ending(outcome="failed", reason="out of memory"), wall_s=1.0)
    run = job.directory
    for reason, command in [
        ("out of memory", f"run --resume {run}"),
        (
            f"step-4 is damaged; cosmos run --resume {run} --from previous goes on from it",
            f"run --resume {run} --from previous",
        ),
        (f"step-4 is damaged; cosmos recover {run} --step 2 takes the run there", f"recover {run} --step 2"),
    ]:
        (line,) = [each for each in print_({**summary, "reason": reason}, job).splitlines() if each.startswith("next ")]
        assert " ".join(line.split()) == f"next cosmos {command}"


def print_(summary, job):
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, job, console)
    return console.file.getvalue()


@pytest.fixture
def imitated(job, open_history):
    """A run on demonstrations alone, from its journal."""
    plain = attrs.evolve(job.recipe, reward=(), warmup=None)
    facts = (StageFacts(source="demonstrations"),)
    alone = attrs.evolve(job, recipe=plain, stages=facts, uses_rollouts=False, num_measured_prompts=5)
    history = open_history(alone)
    history.join(roles=("policy",))
    history.work()
    history.end()
    follower = Follower()
    hooks = []
    follower.fold(history.entries, lambda hook, **arguments: hooks.append((hook, arguments)))
    return alone, follower, hooks


def test_a_held_out_loss_is_in_the_summary_the_metrics_and_the_report(imitated):
    job, follower, hooks = imitated
    summary = summarise(job, follower, Ending(outcome="finished"), wall_s=1.0)
    assert [each["step"] for each in summary["evaluations"]] == [0, 3, 6]
    assert summary["evaluations"][0] == {
        "step": 0,
        "loss": 1.0,
        "perplexity": math.e,
        "units": 9,
        "rows": 3,
        "unusable": 0,
        "dropped": {},
    }
    assert (summary["heldout_loss_before"], summary["heldout_loss_after"]) == (1.0, 1 / 7)
    assert summary["heldout_perplexity_after"] == math.exp(1 / 7)
    assert summary["heldout_accuracy_after"] is None
    assert summary["tokens_per_s"]["rollout"] is None
    (*_, last) = [arguments["metrics"] for hook, arguments in hooks if hook == "cosmos_evaluation_finished"]
    assert last == {
        "heldout/loss": 1 / 7,
        "heldout/perplexity": math.exp(1 / 7),
        "heldout/units": 9,
        "heldout/unusable": 0,
    }
    console = Console(file=io.StringIO(), width=120)
    print_summary(summary, job, console)
    assert "1.0000 before → 0.1429 after" in console.file.getvalue()
    job.directory.mkdir()
    page = write_report(job, follower, summary, None).read_text()
    assert "held-out perplexity after" in page
    assert page.count("held-out loss") >= 3, "two tiles and the line of the plot"

    # A loss that is no number leaves the summary readable.
    job, follower, _ = imitated
    done = follower.state.evaluations
    done[-1] = attrs.evolve(done[-1], loss=math.nan)
    summary = summarise(job, follower, Ending(outcome="finished"), wall_s=1.0)
    assert summary["heldout_loss_after"] is None
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert "1.0000 before → not finite after" in print_(summary, job)


def test_a_run_stopped_before_its_second_evaluation_measured_nothing_after(job, open_history):
    plain = attrs.evolve(job.recipe, reward=(), warmup=None)
    facts = (StageFacts(source="demonstrations"),)
    alone = attrs.evolve(job, recipe=plain, stages=facts, uses_rollouts=False, num_measured_prompts=5)
    history = open_history(alone)
    history.join(roles=("policy",))
    history.work(until=1)
    history.stop()
    history.work()
    history.end()
    follower = Follower()
    follower.fold(history.entries)
    summary = summarise(alone, follower, Ending(outcome="stopped"), wall_s=1.0)
    assert [each["step"] for each in summary["evaluations"]] == [0]
    assert summary["heldout_loss_before"] == 1.0
    assert summary["heldout_loss_after"] is summary["heldout_perplexity_after"] is None
    assert "1.0000 before → not measured after" in print_(summary, alone)
    alone.directory.mkdir()
    page = write_report(alone, follower, summary, None).read_text()
    assert "held-out loss before" in page
    assert "held-out loss after" not in page
