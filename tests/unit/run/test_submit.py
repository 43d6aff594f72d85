import json
import os
import stat
from pathlib import Path

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.loading import dump_recipe, load_job, load_recipe
from cosmos_core.config.overrides import apply_override
from cosmos_core.config.sources import split
from cosmos_core.errors import ConfigError, PluginNotFoundError, ReplicaError, UnknownSubmissionError
from cosmos_core.run import folder, provenance
from cosmos_core.run.command import run_recipe
from cosmos_core.run.plan import show_plan
from cosmos_core.run.planning import plan as planning
from cosmos_core.run.planning.plan import make_plan
from cosmos_core.transport.addresses import host_id
from cosmos_service_tools import submission
from cosmos_service_tools.submission import launch_again, launch_recipe, option_overrides, reachable

RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic.toml"
SBATCH = '#!/bin/sh\necho "argument $2" >> {log}\necho "17;cluster"\n{end}\n'


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """`make_plan`, once for each recipe that differs in more than where runs are."""
    known = {}

    def plan(recipe, recipe_path, staging):
        key = dump_recipe(attrs.evolve(recipe, run=attrs.evolve(recipe.run, output_dir="")))
        if key not in known:
            known[key] = make_plan(recipe, recipe_path, tmp_path_factory.mktemp("staging"))
        directory = Path(recipe.run.output_dir) / recipe.run.name
        return attrs.evolve(known[key], job=attrs.evolve(known[key].job, recipe=recipe, directory=directory))

    return plan


@pytest.fixture(autouse=True)
def _planned_once(plans, monkeypatch):
    for module in (submission, planning):
        monkeypatch.setattr(module, "make_plan", plans)


@pytest.fixture
def recipe(tmp_path):
    def load(*overrides, launcher="slurm"):
        folder = f'run.output_dir="{tmp_path}/runs"'
        return load_recipe(RECIPE, overrides=[f"launch.launcher={launcher}", folder, *overrides])

    return load


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands."""

    def install(end="exit 0"):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        sinfo = "#!/bin/sh\necho 'main* 4 gpu:2'\n"
        for name, text in (("sbatch", SBATCH.format(log=tmp_path / "log", end=end)), ("sinfo", sinfo)):
            (folder / name).write_text(text)
            (folder / name).chmod(stat.S_IRWXU)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return install


@pytest.fixture
def console(tmp_path):
    with (tmp_path / "shown").open("w") as file:
        yield Console(file=file, width=200)


def shown(console, tmp_path):
    console.file.flush()
    return (tmp_path / "shown").read_text()


def test_a_run_is_made_and_submitted_and_submitted_again(recipe, slurm, console, tmp_path):
    slurm()
    file = tmp_path / "late.py"
    file.write_text("def short(completion): return 1.0\n")
    launch_recipe(recipe(f"reward=[{{plugin='{file}:short'}}]"), RECIPE, console)
    run = tmp_path / "runs" / "arithmetic"
    assert (tmp_path / "log").read_text() == f"argument {run}/job.sh\n"
    assert "Slurm job 17;" in shown(console, tmp_path)
    assert "component 1, policy: 1 process without GPUs (launch.options.gpus_per_node gives them), 1 CPU each" in (
        shown(console, tmp_path)
    )
    assert (run / "job.json").exists()
    assert 'bind = "0.0.0.0"' in (run / "recipe.resolved.toml").read_text()
    with pytest.raises(ConfigError, match="go on with it: cosmos run --resume"):
        launch_recipe(recipe(), RECIPE, console)
    launch_again(run, "slurm", ['launch.options.time="30"'], console)
    assert "#SBATCH --time=30" in (run / "job.sh").read_text()
    assert 'time = "30"' in (run / "recipe.resolved.toml").read_text()

    # A mended reward is tried on the first row, and the run remembers whose file its copy is of.
    mended, before = [f"reward.0.plugin={file}:short"], load_job(run)
    file.write_text("def short(completion): return None\n")
    with pytest.raises(ConfigError, match="reward short: it scores neither"):
        launch_again(run, "slurm", mended, console)
    assert load_job(run) == before
    file.write_text("def short(completion): return 2.0\n")
    launch_again(run, "slurm", mended, console)
    assert "Changed since the run's last session: reward short of late.py was " in shown(console, tmp_path)
    copy, _ = split(load_job(run).recipe.reward[0].plugin)
    assert copy.read_text() == file.read_text()
    file.write_text("def short(completion): return 3.0\n")
    ((_, setting, told),) = provenance.sources(load_job(run))
    assert setting == f"--set {mended[0]}"
    assert "The file of reward short has changed" in told


def test_rendering_leaves_nothing_behind(recipe, console, tmp_path):
    launch_recipe(recipe(), RECIPE, console, render_only=True)
    assert shown(console, tmp_path).startswith(
        "#!/bin/bash\n# Submitted by `cosmos launch`, which makes the run's folder"
    )
    assert not (tmp_path / "runs").exists()


def test_what_the_scheduler_refuses_leaves_no_run(recipe, slurm, console, tmp_path, monkeypatch):
    # What is refused by the scheduler leaves no run.
    slurm("exit 1")
    with pytest.raises(ReplicaError, match=r"sbatch refused .*job\.sh"):
        launch_recipe(recipe(), RECIPE, console)
    assert not (tmp_path / "runs" / "arithmetic").exists()

    # What may have been submitted keeps its folder.
    slurm("exec sleep 10")
    monkeypatch.setattr("cosmos_launcher_slurm.launcher._SUBMIT_S", 0.5)
    with pytest.raises(UnknownSubmissionError, match=r"may have been submitted\. See squeue --name=cosmos-arithmetic"):
        launch_recipe(recipe(), RECIPE, console)
    assert (tmp_path / "runs" / "arithmetic" / "job.json").exists()


@pytest.fixture
def earlier(recipe, slurm, console, tmp_path):
    """A run that is there, with work in it."""
    slurm()
    launch_recipe(recipe(), RECIPE, console)
    (tmp_path / "runs" / "arithmetic" / "work").touch()
    return tmp_path / "runs" / "arithmetic"


def test_a_run_is_replaced_once_another_is_submitted(recipe, earlier, console, tmp_path):
    # What is rendered is what would be submitted.
    with pytest.raises(ConfigError, match=r"run\.name: the run .* exists"):
        launch_recipe(recipe(), RECIPE, console, render_only=True)
    launch_recipe(recipe(), RECIPE, console, render_only=True, overwrite=True)
    assert (earlier / "work").exists()
    launch_recipe(recipe(), RECIPE, console, overwrite=True)
    assert "The earlier run is kept in" in shown(console, tmp_path)
    assert (earlier / "job.json").exists()
    assert not (earlier / "work").exists()
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["arithmetic"]


def test_the_earlier_run_stays_until_another_is_submitted(recipe, slurm, earlier, console, tmp_path):
    # A refused submission does not cost the earlier run.
    slurm("exit 1")
    with pytest.raises(ReplicaError, match="sbatch refused"):
        launch_recipe(recipe(), RECIPE, console, overwrite=True)
    assert (earlier / "work").exists()
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["arithmetic"]

    # A run that goes on is not replaced.
    with folder.held(earlier), pytest.raises(ConfigError, match="is running now, in another session; stop it first"):
        launch_recipe(recipe(), RECIPE, console, overwrite=True)
    announced = {"address": "tcp://127.0.0.1:9", "pid": os.getpid(), "host": host_id()}
    (earlier / "controller.json").write_text(json.dumps(announced))
    with pytest.raises(ConfigError, match=r"is running now \(its controller listens at tcp://127\.0\.0\.1:9\)"):
        launch_recipe(recipe(), RECIPE, console, overwrite=True)
    assert (earlier / "work").exists()
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["arithmetic"]


def test_where_a_submission_is_uncertain_both_runs_stay(recipe, slurm, earlier, console, monkeypatch):
    slurm("exec sleep 10")
    monkeypatch.setattr("cosmos_launcher_slurm.launcher._SUBMIT_S", 0.5)
    with pytest.raises(UnknownSubmissionError, match=r"may have been .* The run that it replaces is in .*replaced-"):
        launch_recipe(recipe(), RECIPE, console, overwrite=True)
    (kept,) = earlier.parent.glob("arithmetic.replaced-*")
    assert (kept / "work").exists()
    assert (earlier / "job.json").exists()
    assert not (earlier / "work").exists()


ELSEWHERE = ("launch.options={image = 'x', pvc = 'y', mount = '/runs'}", 'run.output_dir="/runs"')


def test_keys_are_looked_for_where_they_are(recipe, console, tmp_path):
    # Keys that are elsewhere are not looked for here.
    there = recipe(*ELSEWHERE, 'control.keys="/runs/keys"', launcher="kubernetes")
    launch_recipe(there, RECIPE, console, render_only=True)
    assert 'keys = "/runs/keys"' in shown(console, tmp_path)
    here = recipe(*ELSEWHERE, 'control.keys="keys"', launcher="kubernetes")
    with pytest.raises(ConfigError, match=r"control\.keys: 'keys' is a path from the recipe's folder, .* absolute"):
        launch_recipe(here, RECIPE, console, render_only=True)

    # Keys that are here are looked for.
    with pytest.raises(ConfigError, match=r"control\.keys: .*nowhere"):
        launch_recipe(recipe('control.keys="/nowhere"'), RECIPE, console, render_only=True)
    there = recipe(*ELSEWHERE, 'control.keys="/nowhere"', f'run.output_dir="{tmp_path}"', launcher="kubernetes")
    with pytest.raises(ConfigError, match=r"control\.keys: .*nowhere"):
        run_recipe(there, RECIPE, console, overwrite=False)


def test_variables_that_pods_would_lack_are_told(recipe, console, tmp_path, capsys):
    judge = '{{plugin="judge", name="{0}", options={{url="https://x", model="m", key_variable="{0}"}}}}'
    lacking = [
        f"reward=[{judge.format('HARSH')}, {judge.format('KIND')}]",
        'policy.checkpoint.url="s3://bucket/run"',
        'launch.options.env={KIND={secret="judge", key="key"}, PROD_S3_CHECKPOINT_ACCESS_KEY_ID="${X}"}',
    ]
    there = recipe(*ELSEWHERE, *lacking, launcher="kubernetes")
    launch_recipe(there, RECIPE, console, render_only=True)
    told = [
        line.partition(": not among the variables that launcher")[0] for line in capsys.readouterr().err.splitlines()
    ]
    assert told == ["reward HARSH: HARSH", "s3://: PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY"]
    # A pod of tiny replicas has what a process needs besides, and a GiB for what the plan counts.
    assert [shown(console, tmp_path).count(f"memory: {size}Gi") for size in (5, 6)] == [2, 2]

    # A plan tells the same.
    show_plan(there, RECIPE, console)
    assert "rollout: 1 replicas of 1 pods with 1 processes; 2 CPUs and 6Gi of memory a pod" in shown(console, tmp_path)
    assert "reward HARSH: HARSH: not among" in shown(console, tmp_path)


def test_what_cannot_be_submitted_is_refused(recipe, slurm, console, tmp_path):
    # What no node has is refused.
    slurm()
    with pytest.raises(
        ConfigError, match=r"controller component needs 5 CPUs of one node, and the largest node .* has 4"
    ):
        launch_recipe(recipe("launch.options.controller_cpus=5"), RECIPE, console)
    assert not (tmp_path / "runs").exists()

    # A run elsewhere is not replaced from here.
    with pytest.raises(ConfigError, match=r"--overwrite: launcher 'kubernetes' makes the run's folder itself"):
        launch_recipe(recipe(*ELSEWHERE, launcher="kubernetes"), RECIPE, console, overwrite=True)

    # A launcher of this machine hands nothing over.
    with pytest.raises(ConfigError, match=r"'local' starts processes on this machine .* use cosmos run"):
        launch_recipe(recipe(launcher="local"), RECIPE, console)

    # Only runs whose folder is here are submitted again.
    slurm()
    launch_recipe(recipe(), RECIPE, console)
    options = ["launch.options={image = 'x', pvc = 'y'}"]
    with pytest.raises(ConfigError, match="launcher 'kubernetes' makes the run's folder itself"):
        launch_again(tmp_path / "runs" / "arithmetic", "kubernetes", options, console)


def test_loopback_is_opened(recipe):
    for bind, expected in [("127.0.0.1", "0.0.0.0"), ("::1", "0.0.0.0"), ("10.0.0.7", "10.0.0.7")]:
        assert reachable(recipe(f'control.bind="{bind}"')).control.bind == expected


def test_options_of_a_launcher_are_words_of_the_command_line():
    words = [
        "--gpus-per-node",
        "8",
        "--time=10",
        "--partition",
        "1e3",
        "--account",
        'a"b\\c',
        "--qos",
        "\u00e9\U0001f680",
    ]
    overrides = option_overrides("slurm", words)
    assert overrides[:2] == ["launch.options.gpus_per_node=8", 'launch.options.time="10"']
    data = {}
    for override in overrides:
        apply_override(data, override)
    assert data["launch"]["options"] == {
        "gpus_per_node": 8,
        "time": "10",
        "partition": "1e3",
        "account": 'a"b\\c',
        "qos": "\u00e9\U0001f680",
    }

    # Other words are refused.
    for arguments, words in [
        (["x"], "x: unexpected; options of the launcher are written --name VALUE"),
        (["--time"], "--time: expected a value"),
    ]:
        with pytest.raises(ConfigError, match=words):
            option_overrides("slurm", arguments)

    # An unknown launcher is named.
    with pytest.raises(PluginNotFoundError, match="slurn"):
        option_overrides("slurn", [])
