"""`cosmos launch slurm`, on a Slurm cluster of three nodes on this machine."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.commandline import CommandLine
from tests.following import Following
from tests.nightly.integration.slurm_cluster import lacking, running_cluster

STARTED_S = 240.0  # on a machine with much else to do; by itself, ten


@pytest.fixture(scope="module")
def cluster():
    if why := lacking():
        pytest.skip(why)
    # Not pytest's own folder: munged refuses a socket that others cannot reach.
    place = Path(tempfile.mkdtemp(prefix="cosmos-slurm-"))
    place.chmod(0o755)
    try:
        with running_cluster(place) as found:
            yield found
    finally:
        shutil.rmtree(place)


@pytest.fixture
def launch(cluster, tmp_path, arithmetic, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    command = CommandLine(tmp_path)

    def launch(name, *overrides, options=(), code=0):
        return command("launch", "slurm", *arithmetic(name, *overrides), *options, code=code)

    yield launch
    deadline = time.monotonic() + 40
    while (left := command.left_behind()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"processes left behind: {left}"


def number_of(output):
    return re.search(r"Slurm job (\d+)", output)[1]


def wait_for(path, text, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text() if path.exists() else f"no {path}"
        time.sleep(0.1)


@pytest.mark.timeout(700)
def test_a_run_is_stopped_before_its_time_is_up_and_goes_on_when_it_is_requeued(cluster, launch, tmp_path):
    changes = ("warmup.steps=6", "run.steps=14", "policy.checkpoint.interval=2", "policy.checkpoint.keep=50")
    output = launch("long", *changes, "policy.mesh.dp_shard=2", options=["--time", "20"])
    assert "component 1, policy: 2 processes" in output
    job, run = number_of(output), tmp_path / "runs" / "long"
    cluster.wait_for(job, "RUNNING", timeout_s=60)
    log = run / "logs" / f"slurm-{job}.log"
    wait_for(run / "checkpoints" / "step-4" / "complete.json", "", STARTED_S)
    steps = cluster.call("squeue", "--steps", "--noheader", "--format=%j").split()
    assert {"policy-0", "rollout-0"} <= set(steps)
    assert "policy-0.1" not in steps, "the processes of a replica are tasks of one step"
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    wait_for(log, "JOB REQUEUE", 90)
    stopped = json.loads((run / "summary.json").read_text())
    assert stopped["outcome"] == "stopped"
    assert 4 <= stopped["steps"] < 20
    assert list((run / "checkpoints").glob("step-*"))
    done = cluster.wait_for(job, "COMPLETED", "FAILED", timeout_s=STARTED_S)
    assert (done["JobState"], done["ExitCode"], done["Restarts"]) == ("COMPLETED", "0:0", "1"), log.read_text()
    assert f"Resuming from step {stopped['steps']}" in log.read_text()
    finished = json.loads((run / "summary.json").read_text())
    assert (finished["outcome"], finished["steps"]) == ("finished", 20)
    assert (run / "logs" / "policy-0.1.jsonl").exists()
    hosts = json.loads((run / "controller.json").read_text())["address"]
    assert "127.0.0.1" not in hosts, "what is bound to loopback is out of the replicas' reach"


def policy_works(state):
    return state.turn % 2 == 0 and not state.sleepless and state.running is not None


@pytest.mark.timeout(900)
def test_pools_take_turns_on_the_gpus_of_two_nodes_and_a_replica_killed_asleep_comes_back(cluster, launch, tmp_path):
    changes = (
        "rollout.placement='colocated'",
        "policy.mesh.dp_shard=2",
        "rollout.replicas=2",
        "warmup.steps=30",
        "run.steps=100000",
        "control.lost_after_s=30",
    )
    output = launch("turns", *changes, options=["--gpus-per-node", "1"])
    assert "component 1, policy and rollout: 2 nodes of 1 GPUs, 1 processes on each" in output
    job, run = number_of(output), tmp_path / "runs" / "turns"
    cluster.wait_for(job, "RUNNING", timeout_s=60)
    names = {"policy-0", "rollout-0", "rollout-1"}
    with Following(run, SimpleNamespace(poll=lambda: None)) as following:
        following.until(lambda state: names <= state.replicas.keys(), STARTED_S)
        places = {name: psutil.Process(following.pid(name)).environ() for name in names}
        nodes = {name: each["SLURMD_NODENAME"] for name, each in places.items()}
        assert nodes["policy-0"] == nodes["rollout-0"] != nodes["rollout-1"]
        assert [each["CUDA_VISIBLE_DEVICES"] for each in places.values()] == ["0"] * 3
        following.until(policy_works, STARTED_S)
        before = following.incarnation("rollout-0")
        following.signal("rollout-0", signal.SIGKILL)
        following.until(following.is_back("rollout-0", before), STARTED_S)
        following.until(lambda state: state.step >= 34, STARTED_S)
    cluster.call("scancel", "--batch", "--signal=TERM", job)
    cluster.wait_for(job, "FAILED", "CANCELLED", timeout_s=STARTED_S)
    assert json.loads((run / "summary.json").read_text())["outcome"] == "stopped"
    losses = [timed.record.metrics["loss"] for timed in following.follower.steps][:30]
    assert losses[-1] < 0.8 * losses[0], losses


def test_a_failed_run_fails_its_job_and_is_not_requeued(cluster, launch, tmp_path):
    folder = tmp_path / "runs" / "broken"
    output = launch("broken", options=["--set", f'launch.options.setup=["rm {folder}/job.json"]'])
    done = cluster.wait_for(number_of(output), "COMPLETED", "FAILED", timeout_s=60)
    assert (done["JobState"], done["ExitCode"], done["Restarts"]) == ("FAILED", "2:0", "0")
    assert "not the folder of a run" in (folder / "logs" / f"slurm-{number_of(output)}.log").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--partition", "gold"], "launch.options.partition: the cluster has no partition 'gold'; it has main"),
        (["--account", "nobody", "--set", 'launch.options.sbatch=["--nodelist=n7"]'], "sbatch refused"),
    ],
)
def test_what_the_cluster_cannot_do_is_refused_and_leaves_nothing(launch, tmp_path, options, words):
    output = launch("refused", options=options, code=1 if "sbatch" in words else 2)
    assert words in output.replace("\n", " ")
    assert not (tmp_path / "runs" / "refused").exists()
