"""Changes of dynamic keys: checked with the run's plugins, asked for, and shown to people and trackers."""

import io
from types import SimpleNamespace

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.dynamic import dynamic_keys
from cosmos_core.config.loading import recipe_from, save_job
from cosmos_core.config.stages import stages
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.controller.machine.events import Commanded
from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.plugin.selection import PluginSet
from cosmos_core.run import setting
from cosmos_core.run.follow import Follower, step_metrics
from cosmos_core.run.look import settings_lines
from cosmos_core.run.plan import dynamic_options
from cosmos_core.run.report import write_report
from cosmos_core.run.summary import print_summary, summarise
from cosmos_core.run.supervise import Ending
from cosmos_core.transport.requests import Set
from cosmos_core.transport.wire import REQUEST
from cosmos_core.types import Prompt

LR = "policy.optimizer.lr"


def put(history, *overrides):
    request = REQUEST.encode(Set(overrides=overrides))
    history.append(Commanded(ident=f"set-{len(history.entries)}", request=request))


@pytest.fixture
def job(job):
    """Whose algorithm has options that are dynamic."""
    plugins = PluginSet.load([("algorithm", "grpo")])
    options = plugins.provider("algorithm", "grpo").options
    facts = attrs.evolve(job.stages[1], dynamic=dynamic_keys(options, options(), "algorithm.options"))
    return attrs.evolve(job, stages=(job.stages[0], facts))


@pytest.fixture
def steered(history):
    """A run that has ended, with changes while its sixth step is trained."""
    history.join()
    history.work(until=5)
    put(history, f"{LR}=0.5", "algorithm.options.dual_clip=3")
    history.work()
    history.end()
    return history


@pytest.fixture
def asked(job, monkeypatch):
    """Answers in the place of a controller: `asked.history` takes in what is asked for."""

    class Asked:
        history = None
        requests = ()

    def ask(directory, request):
        Asked.requests = (*Asked.requests, request)
        put(Asked.history, *request.overrides)

    monkeypatch.setattr(setting, "address_of", lambda directory, job: "tcp://127.0.0.1:1")
    monkeypatch.setattr(setting, "person_key", lambda keys: None)
    monkeypatch.setattr(setting, "so_far", lambda *_, after=0: Asked.history.entries[after:] if Asked.history else [])
    monkeypatch.setattr(setting, "ask", ask)
    save_job(job)
    return Asked


def test_what_was_taken_in_is_told_with_its_step(asked, history, job):
    asked.history = history
    history.join()
    (change,) = setting.change_settings(job.directory, [f"{LR}=0.5"])
    assert attrs.astuple(change) == (1, LR, 1e-6, 0.5)
    assert setting.change_settings(job.directory, [f"{LR}=0.5"]) == ()
    assert [request.overrides for request in asked.requests] == [(f"{LR}=0.5",)] * 2


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([f"{LR}=-1"], "policy.optimizer.lr: expected a number ≥ 0, got -1"),
        (["algorithm.options.clip_hihg=0.3"], "did you mean algorithm.options.clip_high?"),
        (["algorithm.options.old_logprobs=recompute"], "algorithm.options.old_logprobs: no dynamic key of this run"),
        (["rollout.replicas=3"], "rollout.replicas: cannot change while the run goes on"),
    ],
)
def test_what_is_wrong_is_refused_before_anybody_is_asked(asked, history, job, overrides, told):
    asked.history = history
    with pytest.raises(ConfigError) as caught:
        setting.change_settings(job.directory, overrides)
    assert told in str(caught.value)
    assert asked.requests == ()


def test_what_only_the_algorithm_can_see_is_refused_too(asked, history, job):
    """Recomputed log-probs leave stale samples uncorrected: fine in a run whose samples are never stale."""
    data = unstructure(job.recipe)
    data["algorithm"]["options"] = {"old_logprobs": "recompute"}
    data["sync"]["max_staleness"] = 0
    save_job(attrs.evolve(job, recipe=recipe_from(data)))
    asked.history = history
    with pytest.raises(ConfigError, match="samples up to 2 steps old would go uncorrected"):
        setting.change_settings(job.directory, ["sync.max_staleness=2"])
    assert asked.requests == ()


def test_a_run_that_has_not_begun(asked, job):
    with pytest.raises(ReplicaError, match="has not begun yet"):
        setting.change_settings(job.directory, [f"{LR}=0.5"])


def test_hooks_and_trackers_are_told(steered):
    told = []
    follower = Follower()
    follower.fold(steered.entries, lambda hook, **arguments: told.append((hook, arguments)))
    changes = [arguments for hook, arguments in told if hook == "cosmos_setting_changed"]
    assert changes == [
        {"step": 7, "key": LR, "before": 1e-6, "after": 0.5},
        {"step": 7, "key": "algorithm.options.dual_clip", "before": None, "after": 3.0},
    ]
    metrics = {timed.record.step: step_metrics(timed.record) for timed in follower.steps}
    assert f"setting/{LR}" not in metrics[6]
    assert metrics[7][f"setting/{LR}"] == metrics[9][f"setting/{LR}"] == 0.5


def test_summary_report_and_status_show_them(steered, job):
    follower = Follower()
    follower.fold(steered.entries)
    summary = summarise(job, follower, Ending(outcome="finished"), {}, wall_s=1.0)
    assert summary["settings"][0] == {"step": 7, "key": LR, "before": 1e-6, "after": 0.5}
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, job, console)
    assert f"{LR}: 1e-06 → 0.5 from step 7 on" in console.file.getvalue()
    job.directory.mkdir()
    rows = SimpleNamespace(row=lambda split, index: Prompt(text=f"row {index}"))
    page = write_report(job, follower, summary, rows).read_text()
    table = page.partition("Settings that were changed")[2].partition("</table>")[0]
    assert f'<td class="number">7</td><td>{LR}</td><td>1e-06</td><td>0.5</td>' in table
    assert list(settings_lines(follower.state)) == [
        "  algorithm.options.dual_clip = 3.0 since step 7 (recipe: None)",
        f"  {LR} = 0.5 since step 7 (recipe: 1e-06)",
    ]


def test_a_resumed_run_tells_again_only_of_what_is_asked_again(history):
    history.join()
    history.work(until=4)
    put(history, f"{LR}=0.5")
    history.work(until=6)
    history.resume(4)
    history.join(step=4)
    put(history, "sync.interval=2")
    told = []
    follower = Follower()
    follower.fold(history.entries, lambda hook, **arguments: told.append((hook, arguments.get("key"))))
    assert [key for hook, key in told if hook == "cosmos_setting_changed"] == [LR, "sync.interval"]
    assert [change.key for change in follower.state.changes] == ["sync.interval"]


def test_planning_tells_which_options_of_the_algorithms_are_dynamic(job):
    plugins = PluginSet.load([("algorithm", "dapo"), ("algorithm", "sft")])
    recipe = structure(
        {**unstructure(job.recipe), "algorithm": {"plugin": "dapo", "options": {"clip_high": 0.4}}}, type(job.recipe)
    )
    warmup, main = stages(recipe)
    assert dynamic_options(plugins, warmup) == ()
    found = {each.key: each.value for each in dynamic_options(plugins, main)}
    assert found["algorithm.options.clip_high"] == 0.4
    assert "algorithm.options.importance_cap" not in found
