"""Changes of dynamic keys: checked with the run's plugins, asked for, and shown to people and trackers."""

import io
from types import SimpleNamespace

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.dynamic import dynamic_keys
from cosmos_core.config.job import stages
from cosmos_core.config.loading import recipe_from, save_job
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.control.machine import changes, core
from cosmos_core.control.machine.events import Commanded
from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import NoOptions
from cosmos_core.run.follower import Follower, step_metrics
from cosmos_core.run.planning.plan import dynamic_options
from cosmos_core.run.report.page import write_report
from cosmos_core.run.report.summary import print_summary, summarise
from cosmos_core.run.status import settings_lines
from cosmos_core.run.supervisor import Ending
from cosmos_core.transport.messages import REQUEST, Set, Settable
from cosmos_core.transport.sockets import Closing
from cosmos_core.types import Prompt
from cosmos_service_tools import settings as setting
from tests.world_model import World

WORLD = World(NoOptions(), SimpleNamespace(path=None))
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
def asked(history, job, monkeypatch):
    """Answers in the place of a controller: `history` takes in what is asked for."""

    class Asked(Closing):
        def __init__(self):
            self.requests = ()

        def close(self):
            pass

        def settable(self):
            return changes.settable(history.state)

        def ask(self, request):
            self.requests = (*self.requests, request)
            if not (refusal := core.refusal(history.state, request)):
                put(history, *request.overrides)
            return refusal

    asked = Asked()
    monkeypatch.setattr(setting, "controller_client", lambda directory, job: asked)
    save_job(job)
    return asked


def test_what_was_taken_in_is_told_with_its_step(asked, history, job):
    history.join()
    history.work(until=5)
    (change,) = setting.change_settings(job.directory, [f"{LR}=0.5"])
    assert change == setting.Changed(key=LR, before=1e-6, after=0.5, step=7, waits=False)
    assert setting.change_settings(job.directory, [f"{LR}=0.5"]) == ()
    (again,) = setting.change_settings(job.directory, [f"{LR}=0.25", "sync.interval=1"])
    assert (again.before, again.after) == (0.5, 0.25)
    assert [request.overrides for request in asked.requests[:2]] == [(f"{LR}=0.5",)] * 2


def test_a_key_of_a_stage_to_come_waits_for_it_and_one_of_a_stage_that_is_over_is_refused(asked, history, job):
    history.join()
    (change,) = setting.change_settings(job.directory, [f"{LR}=0.5"])
    assert (change.step, change.waits) == (4, True)
    history.work(until=3)
    with pytest.raises(ReplicaError, match=r"warmup\.optimizer\.lr: the last step that goes by it, 3, is ordered"):
        setting.change_settings(job.directory, ["warmup.optimizer.lr=1"])
    assert history.state.steps[-1].step == 3


def test_a_run_that_is_ending_takes_no_change(asked, history, job):
    history.join()
    history.work(until=8)
    history.stop()
    with pytest.raises(ReplicaError, match="the run is stopping: no further step will be ordered"):
        setting.change_settings(job.directory, [f"{LR}=0.5"])


def test_a_run_whose_last_step_is_ordered_takes_no_change(asked, history, job):
    history.join()
    while history.state.attempts == 0 or history.state.step < 8:
        history.work(until=history.state.step + 1) if history.state.step < 8 else history.turn()
    assert history.state.step == 8
    with pytest.raises(ReplicaError, match="the run's last step, 9, is ordered or done"):
        setting.change_settings(job.directory, [f"{LR}=0.5"])


def test_what_is_wrong_is_refused_before_anybody_is_asked(asked, history, job):
    for overrides, told in [
        ([f"{LR}=-1"], "policy.optimizer.lr: expected a number > 0, got -1"),
        (["algorithm.options.clip_hihg=0.3"], "did you mean algorithm.options.clip_high?"),
        (
            ["algorithm.options.old_logprobs=recompute"],
            "algorithm.options.old_logprobs: cannot change in this run: grpo takes it once, when its stage begins",
        ),
        (["rollout.replicas=3"], "rollout.replicas: cannot change while the run goes on"),
    ]:
        with pytest.raises(ConfigError) as caught:
            setting.change_settings(job.directory, overrides)
        assert told in str(caught.value)
        assert asked.requests == ()


def test_what_only_plugins_can_see_is_refused_too(asked, history, job):
    # What only the algorithm can see is refused too.
    # Recomputed log-probs leave stale samples uncorrected: fine in a run whose samples are never stale.
    data = unstructure(job.recipe)
    data["algorithm"]["options"] = {"old_logprobs": "recompute"}
    data["sync"]["max_staleness"] = 0
    save_job(attrs.evolve(job, recipe=recipe_from(data)))
    with pytest.raises(ConfigError, match="samples up to 2 steps old would go uncorrected"):
        setting.change_settings(job.directory, ["sync.max_staleness=2"])
    assert asked.requests == ()

    # A model that the recipe lacks is told of before anybody is asked.
    # A penalty needs a reference, which no running process has.
    data = unstructure(job.recipe)
    data |= {"algorithm": {"plugin": "ppo"}, "critic": {}}
    plugins = PluginSet.load([("algorithm", "ppo")])
    options = plugins.provider("algorithm", "ppo").options
    facts = attrs.evolve(job.stages[1], dynamic=dynamic_keys(options, options(), "algorithm.options"))
    save_job(attrs.evolve(job, recipe=recipe_from(data), stages=(job.stages[0], facts)))
    known = Settable(step=1, keys=facts.dynamic, fixed={}, values={}, since={})
    asked.settable = lambda: known
    with pytest.raises(ConfigError, match=r"consults a reference model, and the recipe has none"):
        setting.change_settings(job.directory, ["algorithm.options.kl_weight=0.1"])
    assert asked.requests == ()


def test_what_only_the_engine_can_see_is_refused_too(asked, history, job, monkeypatch):
    """A world model has no temperature, which its engine says of each request, at the cost of its replica."""
    data = unstructure(job.recipe)
    data["rollout"]["engine"] = {"plugin": "diffusion"}
    save_job(attrs.evolve(job, recipe=recipe_from(data)))
    monkeypatch.setattr(setting, "load_model", lambda job, plugins: WORLD)
    with pytest.raises(ConfigError) as caught:
        setting.change_settings(job.directory, ["rollout.sampling.temperature=0.7"])
    assert str(caught.value).startswith("rollout.sampling.temperature: 0.7; a denoised sample has no temperature")
    assert asked.requests == ()
    monkeypatch.setattr(setting, "load_model", None)
    setting.change_settings(job.directory, [f"{LR}=0.5"])


def test_hooks_summary_report_and_status_are_told(steered, job):
    # Hooks and trackers are told.
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

    # Summary report and status show them.
    follower = Follower()
    follower.fold(steered.entries)
    summary = summarise(job, follower, Ending(outcome="finished"), wall_s=1.0)
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
