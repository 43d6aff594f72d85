"""Going on with a run: what is refused, and that a refusal leaves the run's folder as it was."""

import io
import json
import shutil
import socket
from pathlib import Path
from unittest.mock import Mock

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.loading import load_job, load_recipe
from cosmos_core.config.schema import MeshConfig
from cosmos_core.config.sources import split
from cosmos_core.control.journal import Journal, entries, replay
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import Resumed, RolledBack
from cosmos_core.control.machine.settings import settings_of
from cosmos_core.control.recovery_snapshots import RecoverySnapshots
from cosmos_core.errors import ConfigError, DamagedCheckpointError, DataError, JournalError, PluginBrokenError
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.recipe import selections
from cosmos_core.policy.checkpoints.checkpoint import COMPLETE, Contents, marker, path_of, read_place
from cosmos_core.run import command, folder, fork_server, provenance
from cosmos_core.run import plan as preparing
from cosmos_core.run.command import resume_run, run_recipe
from cosmos_core.run.follower import Follower
from cosmos_core.run.planning import footprint
from cosmos_core.run.planning import plan as planning
from cosmos_core.run.report.summary import print_summary, summarise
from cosmos_core.run.supervisor import Ending
from cosmos_service_tools import joining
from cosmos_service_tools import recovery as recovering
from cosmos_service_tools.auditor import audit

RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic.toml"
SETTINGS = ["warmup.steps=3", "run.steps=6", "warmup.optimizer.warmup_steps=0"]


@pytest.fixture
def directory(job, tmp_path):
    """A run that finished after all of its 9 steps."""
    recipe = load_recipe(RECIPE, overrides=SETTINGS)
    folder.create(
        attrs.evolve(job, recipe=recipe), tmp_path / "none", {"plugins": [], "cosmos_core": "0.1.0"}, overwrite=False
    )
    folder.write_json(job.directory / folder.SUMMARY, {"outcome": "finished", "steps": 9, "wall_s": 1.0})
    return job.directory


@pytest.fixture
def begun(monkeypatch):
    """The sessions that began."""
    sessions = []
    monkeypatch.setattr(command, "_supervise", lambda session, *_: sessions.append(session) or "stopped")
    return sessions


def resume(directory, *overrides):
    return resume_run(directory, Console(file=io.StringIO()), overrides=overrides)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.stat().st_size}


def test_a_longer_run_goes_on_and_its_folder_says_so(directory, begun):
    assert resume(directory, "run.steps=8") == "stopped"
    assert begun[0].job == load_job(directory)
    assert load_recipe(directory / "recipe.resolved.toml") == begun[0].job.recipe
    (session,) = json.loads((directory / "manifest.json").read_text())["resumed"]
    assert session["changes"] == ["run.steps was 6, is 8"]

    # A longer run whose session did not get far can be resumed.
    resume(directory, "run.steps=8")
    # The session ended before its controller wrote anything: the summary is still of the shorter run.
    assert resume(directory) == resume(directory, "run.steps=8") == "stopped"
    assert [session.job.recipe.run.steps for session in begun] == [8] * 4


def test_what_cannot_begin_changes_nothing(directory, begun, monkeypatch):
    # A finished run stays as it is.
    for override in ["run.steps=6", "run.steps=5", "evaluation.interval=7"]:
        before = contents(directory)
        assert resume(directory, override) == "finished"
        assert (begun, contents(directory)) == ([], before)
    for override, message in [
        ("tracking={hooks=['mlflow'], options={mlflow={experimant='x'}}}", "experimant: unknown option"),
        ("tracking.hooks=['mlfow']", "mlfow"),
        ("evaluation.prompts=3", "keeps what its weights"),
        ("control.bind=0.0.0.0", "other machines can reach 0.0.0.0"),
    ]:
        before = contents(directory)
        with pytest.raises(Exception, match=message):
            resume(directory, "run.steps=8", override)
        assert (begun, contents(directory)) == ([], before)

    # A port in use changes nothing.
    before = contents(directory)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"^control\.bind, control\.port: .*in use"):
            resume(directory, "run.steps=8", f"control.port={taken.getsockname()[1]}")
    assert (begun, contents(directory)) == ([], before)

    # A layout that does not fit changes nothing.
    def refuse(job):
        assert job.recipe.policy.mesh.tp == 3
        raise ConfigError("3 does not divide")

    monkeypatch.setattr(planning, "check_changed", refuse)
    monkeypatch.setattr(fork_server, "place", lambda: None)  # a fork of this process knows of it
    before = contents(directory)
    with pytest.raises(ConfigError, match="3 does not divide"):
        resume(directory, "run.steps=8", "policy.mesh.tp=3")
    assert (begun, contents(directory)) == ([], before)

    # Nor do GPUs that others use by now.
    monkeypatch.setattr(command, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(planning, "plan_again", lambda job: f"the plan of {job.recipe.run.steps} steps")

    def crowded(*asked):
        assert asked == ("the plan of 8 steps", None)
        raise ConfigError("others hold 9 GiB of it")

    monkeypatch.setattr(footprint, "check_gpu_memory", crowded)
    with pytest.raises(ConfigError, match="others hold 9 GiB of it"):
        resume(directory, "run.steps=8")
    assert (begun, contents(directory)) == ([], before)


def test_a_replica_joins_where_its_gpus_hold_it_alone(directory, monkeypatch):
    asked = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    monkeypatch.setattr(joining, "joined_with", lambda *_: [])
    monkeypatch.setattr(preparing, "in_fork", lambda call: call())
    monkeypatch.setattr(planning, "plan_again", lambda job: "plan")
    monkeypatch.setattr(footprint, "check_gpu_memory", lambda plan, joins: asked.append((plan, joins)))

    def join(role, **pool):
        job = load_job(directory)
        recipe = attrs.evolve(job.recipe, **{role: attrs.evolve(getattr(job.recipe, role), **pool)})
        folder.save(attrs.evolve(job, recipe=recipe))
        joining.prepare(role, directory, "tcp://127.0.0.1:1", name=None, checkpoint=None)

    with pytest.raises(ConfigError, match=r"^rollout\.mesh: 2 processes .* and this machine has 1"):
        join("rollout", mesh=MeshConfig(tp=2))
    # What the other role has is elsewhere.
    join("policy", replicas=3)
    with pytest.raises(ConfigError, match=r"^policy\.mesh: 2 processes .* and this machine has 1"):
        join("policy", mesh=MeshConfig(dp_shard=2))
    join("rollout", mesh=MeshConfig())
    assert asked == [("plan", "policy"), ("plan", "rollout")]


def test_the_steps_of_a_warmup_are_told_apart(directory, begun, monkeypatch):
    job = load_job(directory)

    def make(call):
        shutil.rmtree(directory)
        folder.create(attrs.evolve(job, run_id=call.keywords["run_id"]), directory, {}, overwrite=False)

    monkeypatch.setattr(command, "in_fork", make)
    monkeypatch.setattr(command, "prepare", lambda _: None)
    here = [f"run.output_dir='{directory.parent}'", f"run.name='{directory.name}'"]
    console = Console(file=io.StringIO(), width=100)
    run_recipe(load_recipe(RECIPE, overrides=[*SETTINGS, *here]), RECIPE, console, overwrite=True)
    assert "9 steps: 3 of warm-up, and run.steps = 6\n" in console.file.getvalue()

    # What ends it before anything has begun leaves no folder that could only be replaced, unless it is another run's.
    for error, makes_it in [(DataError("other rows"), True), (KeyboardInterrupt(), True), (KeyboardInterrupt(), False)]:
        folder.create(job, directory, {}, overwrite=True)
        monkeypatch.setattr(command, "in_fork", make if makes_it else lambda _: None)
        monkeypatch.setattr(command, "load_dataset", Mock(side_effect=error))
        with pytest.raises(type(error)):
            run_recipe(load_recipe(RECIPE, overrides=[*SETTINGS, *here]), RECIPE, console, overwrite=True)
        assert directory.exists() != makes_it


def test_a_mended_reward_is_taken_when_asked_for_and_told_of_when_not(job, tmp_path, begun, monkeypatch):
    file = tmp_path / "late.py"
    file.write_text("def short(completion): return None\ndef long(completion): return 1.0\n")
    selected = f"reward=[{{plugin='{file}:short'}}, {{plugin='{file}:long'}}]"
    job = attrs.evolve(job, recipe=load_recipe(RECIPE, overrides=[*SETTINGS, selected]))
    made_with = provenance.made_with(choose(kind, name, discover()) for kind, name in selections(job.recipe))
    folder.create(job, tmp_path / "none", made_with, overwrite=False)
    checked, run = [], job.directory
    monkeypatch.setattr(command, "in_fork", lambda call: call())
    monkeypatch.setattr(command, "prepare", lambda recipe: None)  # forks nothing
    monkeypatch.setattr(command, "check_again", lambda job, **_: checked.append(job))

    def go_on(*overrides):
        console = Console(file=io.StringIO(), width=100)
        resume_run(run, console, overrides=overrides)
        return console.file.getvalue(), load_job(run).recipe.reward[0].plugin

    # Another function of it is another reward.
    kept = r"the file of a reward function, not its NAME \(reward\.0\.plugin=FILE\.py:short, reward\.1\."
    with pytest.raises(ConfigError, match=kept):
        go_on(f"reward.0.plugin={file}:other")

    # The end of a run that failed for it names the way to take the mended file.
    console = Console(file=io.StringIO(), width=400)
    summary = summarise(job, Follower(), Ending(outcome="failed", reason="reward short: it hangs"), wall_s=1.0)
    print_summary(summary, load_job(run), console)
    assert f"cosmos run --resume {run} --set reward.0.plugin={file}:short\n" in console.file.getvalue()

    said, before = go_on()
    assert "has changed" not in said
    # A run's code never changes by itself.
    file.write_text("def short(completion): return 1.0\ndef long(completion): return 1.0\n")
    said, kept = go_on()
    assert kept == before
    assert f"The file of reward short has changed: the run goes on with its copy of {made_with['created']}" in said
    assert f"--set reward.0.plugin={file}:short\n" in said

    monkeypatch.chdir(tmp_path)
    said, taken = go_on("reward.0.plugin=./late.py:short")
    copy, _ = split(taken)
    assert (copy.read_text(), copy.is_relative_to(run), begun[-1].job) == (file.read_text(), True, load_job(run))
    assert len(checked) == 1
    assert f"short of late.py was {Path(before).parent.name}, is {copy.parent.name}" in said
    assert "reward short has changed" not in said
    assert "reward long has changed" in said
    # The same file is no change; another function is another reward; a copy that was tampered with is refused.
    assert go_on("reward.0.plugin=./late.py:short")[1] == taken
    assert len(checked) == 1
    with pytest.raises(ConfigError, match=r"--set reward\.0\.plugin: a run that goes on keeps"):
        resume(run, "reward.0.plugin=./late.py:other")
    copy.write_text("def short(completion): return 2.0\n")
    with pytest.raises(PluginBrokenError, match="is not what the run was made with"):
        resume(run, "run.steps=9")


def test_two_sessions_at_once_are_refused(directory, begun, tmp_path):
    before = contents(directory)
    recipe = load_job(directory).recipe
    recipe = attrs.evolve(recipe, run=attrs.evolve(recipe.run, output_dir=str(directory.parent), name=directory.name))
    with folder.held(directory):
        with pytest.raises(ConfigError, match="is running now, in another session"):
            resume(directory, "run.steps=8")
        with pytest.raises(ConfigError, match="is running now, in another session"):
            run_recipe(recipe, RECIPE, Console(file=io.StringIO()), overwrite=True)
    assert (begun, contents(directory)) == ([], before)
    assert resume(directory, "run.steps=8") == "stopped"

    # What is no run is not resumed.
    with pytest.raises(ConfigError, match=r"not the folder of a run \(it has no job\.json\)"):
        resume(tmp_path)
    assert list(tmp_path.iterdir()) == [directory]


FAKE = [
    "policy.prompts_per_step=2",
    "warmup.prompts_per_step=2",
    "rollout.group_size=4",
    "policy.checkpoint.interval=4",
    "policy.checkpoint.keep=4",
]


@pytest.fixture
def interrupted(job, tmp_path, open_history, put_checkpoint):
    """A run whose controller was killed at its end, with checkpoints of steps 4, 8 and 9; resuming finds them."""
    job = attrs.evolve(job, recipe=load_recipe(RECIPE, overrides=[*SETTINGS, *FAKE]))
    folder.create(job, tmp_path / "none", {"plugins": [], "cosmos_core": "0.1.0"}, overwrite=False)
    history, snapshots = open_history(job), RecoverySnapshots(job.recovery_snapshots, keep=4)
    history.join()
    for step in range(1, 10):
        history.work(until=step)
        snapshots.note(history.state)
    history.work()
    snapshots.note(history.state)
    write_journal(job, history)
    for step in (4, 8, 9):
        put_checkpoint(job, step, history.state.generation_number)
    return job


def write_journal(job, history):
    with Journal(job.journal) as journal:
        for _, _, event in history.entries:
            journal.append(event)
        journal.commit()


@pytest.fixture
def rolled_back(job, tmp_path, open_history, put_checkpoint):
    """A run that was taken back from step 8 to step 4 and killed when it had done step 8 again.

    The checkpoint of step 8 on disk is complete, was never reported, and is of the first time.
    """
    job = attrs.evolve(job, recipe=load_recipe(RECIPE, overrides=[*SETTINGS, *FAKE]))
    folder.create(job, tmp_path / "none", {"plugins": [], "cosmos_core": "0.1.0"}, overwrite=False)
    history, snapshots = open_history(job), RecoverySnapshots(job.recovery_snapshots, keep=4)
    history.join()
    for step in (4, 8):
        history.work(until=step)
        snapshots.note(history.state)
        put_checkpoint(job, step, history.state.generation_number)
    history.lose("policy-0", "its machine is gone")
    del history.fakes["policy-0"]
    history.append(RolledBack(step=4))
    snapshots.note(history.state)
    history.join(roles=("policy",))
    history.work(until=8)
    snapshots.note(history.state)
    assert (history.state.step, sorted(history.state.marks), history.state.checkpoints.ordered) == (8, [0, 4, 8], 8)
    write_journal(job, history)
    return job


def resumed(job, start=None):
    """Resume it as the controller would, from where the command says; what the command said."""
    console, sessions = Console(file=io.StringIO(), width=400), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_supervise", lambda session, *_: sessions.append(session) or "stopped")
        resume_run(job.directory, console, start=start)
    (session,) = sessions
    state = replay(job.journal)
    assert session.follower.state.step == state.step
    assert session.earlier_s == session.follower.timeline.elapsed_s(None), "no session has left a summary"
    assert session.earlier_s > 0.0 or session.follower.timeline.is_recovered
    core.step(state, Resumed(step=session.start.step, settings=settings_of(job)))
    assert state.step == session.start.step
    assert session.start.checkpoint.endswith(f"/step-{state.step}")
    return session.start.step, console.file.getvalue()


def test_a_run_goes_on_from_its_newest_checkpoint(interrupted):
    step, said = resumed(interrupted)
    assert step == 9
    assert "Passed over" not in said

    # A recovered run goes on from the checkpoint that was chosen.
    interrupted.journal.unlink()
    recovering.recover(interrupted.directory, step=4)
    step, said = resumed(interrupted)
    assert step == 4
    assert "Passed over: the checkpoint(s) of step 8, 9 in " in said

    # Of checkpoints that the new journal does not know, a snapshot does.
    shutil.rmtree(path_of(interrupted.checkpoints, 9))
    with pytest.raises(ConfigError, match=r"go on from step-4; cosmos recover \S+ --step 8 takes it to that$"):
        resumed(interrupted, start="previous")
    done = recovering.recover(interrupted.directory, step=8)
    assert (done.damage, done.checkpoint) == ("", path_of(interrupted.checkpoints, 8))
    assert resumed(interrupted)[0] == 8
    assert audit(entries(interrupted.journal)).problems == ()
    shutil.rmtree(path_of(interrupted.checkpoints, 8))
    with pytest.raises(DamagedCheckpointError, match=r"step-8 is no complete .*; cosmos recover \S+ --step 4 takes"):
        resumed(interrupted)
    recovering.recover(interrupted.directory, step=4)

    # Without any checkpoint there is nothing to go on from.
    shutil.rmtree(path_of(interrupted.checkpoints, 4))
    with pytest.raises(DamagedCheckpointError, match=r"step-4 is no complete checkpoint: .*; there is none before it"):
        resumed(interrupted)


def test_a_run_goes_back_to_the_checkpoint_that_is_asked_for_and_says_what_is_undone(interrupted):
    there = r"the run can go on from step-0 \(its beginning\), step-4, step-8, step-9, previous \(step-8\)$"
    for wanted in ("step-7", "7", "step-04", "last"):
        with pytest.raises(ConfigError, match=f"^{wanted}: there is no such checkpoint; {there}"):
            resumed(interrupted, start=wanted)
    for start, step in [("previous", 8), ("step-8", 8), ("step-4", 4), (None, 9)]:
        found, said = resumed(interrupted, start)
        assert found == step
        undone = {8: "9, and the evaluation(s) of step 9", 4: "5 to 9, and the evaluation(s) of step 9"}
        assert (f"Undone, and done again: step(s) {undone.get(step)}\n" in said) == (step < 9)
        assert ("are removed when training goes on" in said) == (step < 9)


def test_a_run_with_a_sound_journal_is_taken_back_for_whoever_resumes_it(interrupted):
    with pytest.raises(ConfigError, match=r"^step-7: there is no such checkpoint; the run can go on from step-0"):
        recovering.recover(interrupted.directory, step=7)
    done = recovering.recover(interrupted.directory, step=4)
    assert (done.damage, done.aside, done.checkpoint) == ("", None, path_of(interrupted.checkpoints, 4))
    assert "step(s) 5 to 9" in done.notes[0]
    assert audit(entries(interrupted.journal)).problems == ()
    assert resumed(interrupted)[0] == 4


def test_a_damaged_newest_checkpoint_is_refused_with_the_way_to_go_on(interrupted):
    newest = Path(path_of(interrupted.checkpoints, 9))
    remedy = f"cosmos run --resume {interrupted.directory} --from previous goes on from step 8$"
    (newest / COMPLETE).write_bytes(b"{")
    with pytest.raises(DamagedCheckpointError, match=rf"step-9/complete\.json is damaged: .*; {remedy}"):
        resumed(interrupted)
    assert resumed(interrupted, start="previous")[0] == 8
    shutil.rmtree(newest)
    with pytest.raises(DamagedCheckpointError, match=f"step-9 is no complete checkpoint: .*; {remedy}"):
        resumed(interrupted)
    contents = Contents(sizes={"__0_0.distcp": 9}, metadata=0)
    place = read_place(path_of(interrupted.checkpoints, 8))
    Path(path_of(interrupted.checkpoints, 8), COMPLETE).write_bytes(marker(attrs.evolve(place, contents=contents)))
    with pytest.raises(
        DamagedCheckpointError, match=r"step-8 is damaged: __0_0\.distcp, .* --from step-4 goes on from"
    ):
        resumed(interrupted, start="previous")
    shutil.rmtree(path_of(interrupted.checkpoints, 8))
    shutil.rmtree(path_of(interrupted.checkpoints, 4))
    with pytest.raises(DamagedCheckpointError, match="--from step-0 goes on from the run's beginning"):
        resumed(interrupted)
    with pytest.raises(ConfigError, match=r"^previous: .* go on from step-0 \(its beginning\), step-9$"):
        resumed(interrupted, start="previous")
    begun = replay(interrupted.journal)
    core.step(begun, Resumed(step=0, settings=settings_of(interrupted)))
    assert (begun.step, begun.ledgers[0].consumed) == (0, 0)


def test_a_recovered_run_without_its_newest_snapshot_goes_on_from_the_one_before(interrupted):
    interrupted.journal.unlink()
    (interrupted.recovery_snapshots / "step-9").write_bytes(b"damaged")
    recovering.recover(interrupted.directory)
    step, said = resumed(interrupted)
    assert step == 8
    assert "Passed over: the checkpoint(s) of step 9 in " in said


def test_a_checkpoint_of_a_step_that_was_undone_and_came_again_is_passed_over(rolled_back):
    step, said = resumed(rolled_back)
    assert step == 4
    assert "Passed over: the checkpoint(s) of step 8 in " in said

    # A run is not recovered from a checkpoint of a step that came again.
    rolled_back.journal.unlink()
    assert recovering.recover(rolled_back.directory).step == 4
    with pytest.raises(JournalError, match="step-8 is of before the step was undone"):
        recovering._snapshot(rolled_back, 8)


def test_a_checkpoint_that_was_never_on_record_is_passed_over(interrupted, put_checkpoint):
    shutil.rmtree(path_of(interrupted.checkpoints, 8))
    put_checkpoint(interrupted, 7, generation=1)
    step, said = resumed(interrupted, start="previous")
    assert step == 4
    assert "of step 7, 9 in " in said
