import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import attrs
import pytest

from cosmos_core.errors import ConfigError, UnknownSubmissionError
from cosmos_core.protocols import LauncherContext, Pool, ProcessSpec
from cosmos_launcher_slurm.cluster import Node, largest
from cosmos_launcher_slurm.components import components
from cosmos_launcher_slurm.launcher import SlurmLauncher
from cosmos_launcher_slurm.options import SlurmOptions
from cosmos_launcher_slurm.task import arguments_of, variables_of

CONTEXT = LauncherContext(
    name="long run",
    directory=Path("/shared/it's/long run"),
    pools=(Pool(role="policy", replicas=3, processes=16, gpus=1), Pool(role="rollout", replicas=5, gpus=2)),
    threads=2,
)
OPTIONS = SlurmOptions(
    partition="h100", account="team", time="12:00:00", gpus_per_node=8, python="/opt/my py/bin/python"
)


def directives(text):
    """The options of each component."""
    parts = [[]]
    for line in text.splitlines():
        if line == "#SBATCH hetjob":
            parts.append([])
        elif line.startswith("#SBATCH "):
            parts[-1] += shlex.split(line.removeprefix("#SBATCH "))
    return parts


def rendered(options=OPTIONS, **changes):
    return SlurmLauncher(options, attrs.evolve(CONTEXT, **changes)).render().text


def test_each_pool_is_a_component_with_nodes_for_its_replicas():
    controller, policy, rollout = directives(rendered())
    assert {"--ntasks=1", "--cpus-per-task=2", "--requeue", "--signal=B:USR1@120"} <= set(controller)
    assert not any("gpu" in option for option in controller)
    assert {"--nodes=6", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=2"} <= set(policy)
    assert {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=8"} <= set(rollout)
    for part in (controller, policy, rollout):
        assert {"--partition=h100", "--account=team", "--time=12:00:00"} <= set(part)
    assert not any(option.startswith(("--requeue", "--signal", "--output")) for option in policy + rollout)


def test_components_are_told_with_their_cpus_and_the_memory_that_the_plan_counts():
    policy, rollout = (attrs.evolve(pool, host_bytes=10 << 30) for pool in CONTEXT.pools)
    free = attrs.evolve(CONTEXT, pools=(policy, rollout), threads=None)
    first, *told = SlurmLauncher(OPTIONS, free).render().notes
    assert first == "component 0, controller: 1 process, 2 CPUs each"
    hint = "1 CPU each (launch.options.cpus_per_node gives each its share of a node's)"
    assert told == [
        f"component 1, policy: 6 nodes of 8 GPUs, 8 processes on each, {hint}; 80 GiB of memory on each by the plan",
        f"component 2, rollout: 2 nodes of 8 GPUs, 4 processes on each, {hint}; 40 GiB of memory on each by the plan",
    ]
    shared = attrs.evolve(free, takes_turns=True)
    _, told = SlurmLauncher(attrs.evolve(OPTIONS, cpus_per_process=1), shared).render().notes
    assert told.endswith(": 6 nodes of 8 GPUs, 8 processes on each, 1 CPU each; 120 GiB of memory on each by the plan")
    # What is one, what the plan does not count, and CPUs that were chosen.
    alone = attrs.evolve(CONTEXT, pools=(Pool(role="policy", replicas=1, processes=1, gpus=1),))
    _, told = SlurmLauncher(attrs.evolve(OPTIONS, gpus_per_node=1), alone).render().notes
    assert told == "component 1, policy: 1 node of 1 GPU, 1 process on each, 2 CPUs each"


def test_processes_share_the_cpus_of_a_node_by_gpus():
    _, policy, rollout = directives(rendered(attrs.evolve(OPTIONS, cpus_per_node=96)))
    assert ("--cpus-per-task=12" in policy, "--cpus-per-task=24" in rollout) == (True, True)
    _, policy, _ = directives(rendered(attrs.evolve(OPTIONS, cpus_per_node=96, cpus_per_process=5)))
    assert "--cpus-per-task=5" in policy


def test_threads_that_nobody_asks_for_follow_the_cpus(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/bash\necho threads $OMP_NUM_THREADS\n")
    srun.chmod(0o755)
    for asked, expected in [(None, "8"), (2, "2")]:
        context = attrs.evolve(CONTEXT, directory=tmp_path, threads=asked)
        launcher = SlurmLauncher(attrs.evolve(OPTIONS, cpus_per_node=96), context)
        launcher.start(ProcessSpec(name="policy-0", module="x", arguments=(), environment={"OMP_NUM_THREADS": "1"}))
        while launcher.running():
            time.sleep(0.01)
        assert f"threads {expected}\n" in (tmp_path / "logs" / "policy-0.log").read_text()


def test_on_cpus_slurm_places_the_processes():
    _, policy, rollout = directives(rendered(SlurmOptions(cpus_per_process=4, sbatch=("--constraint=fast",))))
    assert policy == ["--ntasks=48", "--cpus-per-task=4", "--constraint=fast"]
    assert rollout == ["--ntasks=5", "--cpus-per-task=4", "--constraint=fast"]


def test_imitation_has_no_component_for_rollouts():
    assert len(directives(rendered(pools=CONTEXT.pools[:1]))) == 2


def test_nodes_hold_replicas(subtests):
    for pool, gpus, expected in [
        (Pool(role="policy", replicas=1, processes=12, gpus=1), 8, (2, 6, 6)),  # equally many on each node
        (Pool(role="policy", replicas=3, processes=2, gpus=1), 8, (1, 6, 6)),  # several replicas on a node
        (Pool(role="policy", replicas=5, processes=3, gpus=1), 8, (3, 6, 6)),
        (Pool(role="rollout", replicas=1, gpus=8), 8, (1, 1, 8)),
        (Pool(role="policy", replicas=2, processes=7, gpus=1), 4, (7, 2, 2)),
    ]:
        with subtests.test(pool=pool, gpus=gpus, expected=expected):
            part = components([pool], SlurmOptions(gpus_per_node=gpus), 1)[1]
            assert (part.nodes, part.tasks, part.gpus_per_node) == expected
            assert part.nodes * part.tasks >= pool.replicas * pool.processes


def test_gpus_that_nodes_lack_are_refused(subtests):
    for pool, gpus, words in [
        (
            Pool(role="rollout", replicas=1, gpus=8),
            4,
            "rollout.mesh: each process .* needs 8 GPUs of one node, and .* 4",
        ),
        (
            Pool(role="policy", replicas=1, gpus=1, needs_gpus=True),
            0,
            "policy.device: 'cuda', but .*gpus_per_node is 0",
        ),
    ]:
        with subtests.test(pool=pool, gpus=gpus, words=words), pytest.raises(ConfigError, match=words):
            SlurmLauncher(SlurmOptions(gpus_per_node=gpus), attrs.evolve(CONTEXT, pools=(pool,)))


def test_the_script_is_valid_and_quotes_paths(tmp_path):
    text = rendered()
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in text.splitlines() if "cosmos_core.cli" in line]
    words = [OPTIONS.python, "-P", "-m", "cosmos_core.cli", "run", "--resume", str(CONTEXT.directory), "&"]
    assert shlex.split(line) == words
    assert "--output=/shared/it's/long run/logs/slurm-%j.log" in directives(text)[0]
    assert "--job-name=cosmos-long run" in directives(text)[0]


def test_a_path_of_several_lines_is_refused():
    with pytest.raises(ConfigError, match="a batch script cannot have this path"):
        rendered(directory=Path("/shared/a\nrm -rf x"))


def test_lines_that_are_no_options_are_refused(subtests):
    for options in [{"sbatch": ("x",)}, {"sbatch": ("--a=b\nrm",)}, {"python": "a\nb"}, {"python": " "}]:
        with subtests.test(options=options), pytest.raises(ConfigError, match=r"launch\.options\."):
            SlurmOptions(**options)


def test_words_are_words(subtests):
    for value in ["", "a b", "a\nb"]:
        with subtests.test(value=value), pytest.raises(ValueError, match="expected a word without white space, got"):
            SlurmOptions(partition=value)


FAKE_PYTHON = """#!/bin/bash
echo "run $*" >> {log}
trap 'echo term >> {log}; exit {code}' TERM
touch {log}.up
for i in $(seq 400); do sleep 0.02; done
exit {end}
"""


@pytest.fixture
def job(tmp_path):
    """Run the script with another interpreter and `scontrol`; what both wrote, and the exit code."""

    def run(*, signals=(), early=None, code=130, end=0, setup=()):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        log.with_suffix(".up").unlink(missing_ok=True)
        python, scontrol = tmp_path / "python", tmp_path / "bin" / "scontrol"
        scontrol.parent.mkdir(exist_ok=True)
        python.write_text(
            FAKE_PYTHON.format(log=log, code=code, end=end).replace("400", "400" if signals or early else "1")
        )
        scontrol.write_text(f'#!/bin/bash\necho "scontrol $*" >> {log}\nexit 1\n')
        for each in (python, scontrol):
            each.chmod(0o755)
        launcher = SlurmLauncher(
            SlurmOptions(python=str(python), setup=setup), attrs.evolve(CONTEXT, directory=tmp_path / "it's a run")
        )
        path = f"{scontrol.parent}:{os.environ['PATH']}"
        text = launcher.render().text
        if early:
            late = f"until [ -e {log}.up ]; do sleep 0.01; done; kill -s {early.name} $$"
            assert text.count("&\n#") == 1
            text = text.replace("&\n#", f"&\n{late}\n#")
        process = subprocess.Popen(["bash", "-c", text], env={**os.environ, "PATH": path, "SLURM_JOB_ID": "17"})
        deadline = time.monotonic() + 20
        while not (tmp_path / "log.up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.05)
        return process.wait(20), log.read_text().splitlines()

    return run


def test_a_warned_run_is_stopped_and_requeued(job, tmp_path):
    code, lines = job(signals=[signal.SIGUSR1])
    assert (code, lines[1:]) == (130, ["term", "scontrol requeue 17"])
    assert lines[0].endswith(f"run --resume {tmp_path}/it's a run")


def test_a_warned_run_that_finished_or_failed_is_not_requeued(job, subtests):
    for code in [0, 1, 2]:
        with subtests.test(code=code):
            found, lines = job(signals=[signal.SIGUSR1], code=code)
            assert found == code
            assert not any("scontrol" in line for line in lines)


def test_a_cancelled_run_is_stopped_and_not_requeued(job):
    code, lines = job(signals=[signal.SIGTERM])
    assert (code, lines[1:]) == (130, ["term"])


def test_a_signal_that_comes_before_the_run_has_a_number_stops_it_once(job, subtests):
    for number, last in [(signal.SIGTERM, ["term"]), (signal.SIGUSR1, ["term", "scontrol requeue 17"])]:
        with subtests.test(number=number, last=last):
            code, lines = job(early=number)
            assert (code, lines[1:]) == (130, last)


def test_the_jobs_exit_code_is_the_runs(job, subtests):
    for end in [0, 1, 3]:
        with subtests.test(end=end):
            code, lines = job(end=end)
            assert (code, len(lines)) == (end, 1)


def test_setup_may_use_what_is_not_set(job):
    code, lines = job(setup=('PS1="(env) $NOT_SET_BY_ANYONE"',))
    assert (code, len(lines)) == (0, 1)


def test_a_job_that_may_have_been_submitted_is_no_refused_one(tmp_path, monkeypatch, subtests):
    for how in ["sleep 5", "echo 'Batch job submission failed: Socket timed out' >&2; exit 1"]:
        with subtests.test(how=how), monkeypatch.context() as patch:
            sbatch = tmp_path / "sbatch"
            sbatch.write_text(f"#!/bin/bash\n{how}\n")
            sbatch.chmod(0o755)
            patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
            patch.setattr("cosmos_launcher_slurm.launcher._SUBMIT_S", 0.3)
            with pytest.raises(UnknownSubmissionError) as raised:
                SlurmLauncher(OPTIONS, CONTEXT).submit(tmp_path / "job.sh")
            assert "may have been submitted. See squeue --name='cosmos-long run'; if it is not there" in str(
                raised.value
            )
            assert """--resume '/shared/it'"'"'s/long run'""" in str(raised.value)


def test_a_submitted_job_is_stopped_and_not_requeued(tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/bash\necho '17;cluster'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = SlurmLauncher(OPTIONS, CONTEXT).submit(tmp_path / "job.sh")
    assert "stop it with scancel --batch --signal=TERM 17, stop and requeue it with" in words


def test_the_controller_is_started_here_and_a_replica_as_a_step_of_its_component(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/steps\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    context = attrs.evolve(CONTEXT, directory=tmp_path)
    context.logs.mkdir()
    launcher = SlurmLauncher(OPTIONS, context)
    for name in ("controller", "policy-1", "policy-1.7", "rollout-0"):
        launcher.start(ProcessSpec(name=name, module="platform", arguments=()))
        while launcher.running():
            time.sleep(0.01)
    steps = (tmp_path / "steps").read_text().splitlines()
    assert [step.split()[:2] for step in steps] == [
        ["--het-group=1", "--job-name=policy-1"],
        ["--het-group=2", "--job-name=rollout-0"],
    ]


def test_pools_that_take_turns_have_the_nodes_and_gpus_of_one_component(tmp_path, monkeypatch):
    pools = (
        Pool(role="policy", replicas=1, processes=16, gpus=1),
        Pool(role="rollout", replicas=4, gpus=4, workers=2),
    )
    _, both = directives(rendered(pools=pools, takes_turns=True))
    assert {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=4"} <= set(both)

    (tmp_path / "srun").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/steps\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher = SlurmLauncher(OPTIONS, attrs.evolve(CONTEXT, directory=tmp_path, pools=pools, takes_turns=True))
    for name in ("policy-0", "rollout-0", "rollout-1", "rollout-3"):
        launcher.start(ProcessSpec(name=name, module="platform", arguments=()))
        while launcher.running():
            time.sleep(0.01)
    steps = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    for step in steps:
        assert {"--het-group=1", "--overlap", "--gpus-per-node=8"} <= set(step)
        assert "--exact" not in step
    relative = [next(word for word in step if word.startswith("--relative")) for step in steps]
    assert relative == ["--relative=0", "--relative=0", "--relative=0", "--relative=1"]
    assert [step[-3:] for step in steps] == [[*gpus, "platform"] for gpus in ("10", "40", "44", "44")]
    assert {"--ntasks=16", "--ntasks-per-node=8"} <= set(steps[0])

    with pytest.raises(ConfigError, match=r"hold 4 rollout replicas of 4 GPUs of one node each, and .* is 5"):
        rendered(pools=(pools[0], attrs.evolve(pools[1], replicas=5)), takes_turns=True)
    assert len(directives(rendered(SlurmOptions(), pools=pools, takes_turns=True))) == 3, "CPUs are not shared"


def test_a_task_is_the_process_of_its_rank():
    arguments = ("--run", "/r", "--name", "policy-1", "--rank", "0", "--session", "s")
    assert arguments_of(arguments, {"SLURM_PROCID": "0"}) == list(arguments)
    third = arguments_of(arguments, {"SLURM_PROCID": "3"})
    assert third[: len(arguments)] == list(arguments)
    assert third[len(arguments) :] == ["--name", "policy-1.3", "--rank", "3"]


def test_a_task_uses_its_own_gpus_and_knows_its_rack(subtests):
    for gpus, first, environment, expected in [
        (1, 0, {"SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "2"}),
        (2, 0, {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "6,7"}),
        (1, 2, {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        (0, 0, {"SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": ""}),
        (
            0,
            0,
            {"SLURM_LOCALID": "0", "SLURM_TOPOLOGY_ADDR": "top.leaf3.n17"},
            {"CUDA_VISIBLE_DEVICES": "", "COSMOS_RACK": "top.leaf3"},
        ),
        (0, 0, {"SLURM_LOCALID": "0", "SLURM_TOPOLOGY_ADDR": "n17"}, {"CUDA_VISIBLE_DEVICES": ""}),
        (
            0,
            0,
            {"SLURM_LOCALID": "0", "SLURM_TOPOLOGY_ADDR": "s.n", "COSMOS_RACK": "mine"},
            {"CUDA_VISIBLE_DEVICES": ""},
        ),
    ]:
        with subtests.test(gpus=gpus, environment=environment, expected=expected):
            assert variables_of(gpus, first, environment) == expected


ANSWER = "main* 8 gpu:4\nmain* 16+ gpu:a100:2,gpu:h100:4(S:0-1)\ngold 64 (null)\n"


def test_the_largest_node_of_a_partition():
    assert largest(ANSWER, None) == Node(partition="partition main", cpus=16, gpus=6)
    assert largest(ANSWER, "gold") == Node(partition="partition gold", cpus=64, gpus=0)
    with pytest.raises(ConfigError, match="no partition 'silver'; it has gold, main"):
        largest(ANSWER, "silver")
    with pytest.raises(ConfigError, match="no default partition; choose one; it has gold"):
        largest("gold 1 (null)\n", None)


def test_outside_of_a_job_nothing_can_be_started(monkeypatch):
    launcher = SlurmLauncher(OPTIONS, CONTEXT)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="hand the run over with cosmos launch slurm"):
        launcher.check()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    with pytest.raises(
        ConfigError, match=re.escape("has 2 components, and the run needs 3 (controller, policy, rollout)")
    ):
        launcher.check()


def test_without_sbatch_nothing_is_submitted(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"no sbatch here; .* --render-only"):
        SlurmLauncher(OPTIONS, CONTEXT).ready()
