"""The JobSet of a run, its containers as processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import yaml

from tests.commandline import CommandLine


@pytest.fixture
def cosmos(tmp_path):
    command = CommandLine(tmp_path)
    yield command
    for process in command.left_behind():
        process.kill()


def containers(job_set, replicas):
    """Name, command and variables of each container, with the values that Kubernetes would put in."""
    for job in job_set["spec"]["replicatedJobs"]:
        assert job["replicas"] == replicas[job["name"]]
        for index in range(job["replicas"]):
            (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
            variables = {"COSMOS_REPLICA": str(index), "COSMOS_POD": "0", "COSMOS_LAUNCH_SESSION": "uid-0"}
            yield f"{job['name']}-{index}", container["command"], variables


@pytest.mark.timeout(700)
@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_the_pods_of_a_jobset_train_a_run(cosmos, arithmetic, tmp_path, monkeypatch, placement):
    replicas = {"controller": 1, "policy": 1, "rollout": 2}
    arguments = arithmetic("pods", "warmup.steps=2", "run.steps=2")
    options = ["--image", "none", "--pvc", "none", "--mount", str(tmp_path), "--python", sys.executable]
    overrides = ["rollout.replicas=2", "policy.mesh.dp_shard=2", f'run.output_dir="{tmp_path}/runs"']
    if placement == "colocated":
        # No GPUs, but places for processes, which compute on the CPU.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        options += ["--gpus-per-node", "2"]
        overrides += ["rollout.placement=colocated"]
        del replicas["rollout"]
    settings = [word for each in overrides for word in ("--set", each)]
    text = cosmos("launch", "kubernetes", *arguments, *settings, *options, "--render-only")
    assert not (tmp_path / "runs").exists()
    config_map, job_set = yaml.safe_load_all(text)
    (tmp_path / "recipe.toml").write_text(config_map["data"]["recipe.toml"])
    processes = {}
    for name, command, variables in containers(job_set, replicas):
        words = [word.replace("/etc/cosmos", str(tmp_path)) for word in command]
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
        with (tmp_path / f"{name}.out").open("wb") as output:
            processes[name] = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 600
    while any(process.poll() is None for process in processes.values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    shown = "".join(f"== {name}\n{(tmp_path / f'{name}.out').read_text()}" for name in processes)
    assert {name: process.poll() for name, process in processes.items()} == dict.fromkeys(processes, 0), shown
    summary = json.loads((tmp_path / "runs" / "pods" / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("finished", 4)
    assert (tmp_path / "runs" / "pods" / "logs" / "policy-0.1.jsonl").exists()
