"""Sync mode: a run that was interrupted and resumed ends with the very weights of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "warmup.steps=6",
    "run.steps=6",
    "evaluation.interval=3",
    "evaluation.prompts=16",
    "dataset.options.train_rows=400",
    "sync.mode=sync",
    "tracking.hooks=[]",
    "rollout.replicas=2",
    "policy.prompts_per_step=6",
]


def command(*arguments):
    return [sys.executable, "-m", "cosmos_core.cli", *arguments]


def recipe(folder, name):
    path = folder / "arithmetic.toml"
    text = (ROOT / "recipes" / "arithmetic.toml").read_text()
    # The recipe's own staleness contradicts sync mode, which means none.
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("max_staleness")))
    settings = [argument for setting in SETTINGS for argument in ("--set", setting)]
    return command("run", str(path), "--name", name, "--set", f'run.output_dir="{folder}"', *settings)


def run(arguments, **options):
    return subprocess.run(arguments, capture_output=True, text=True, timeout=110, check=False, **options)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def weights(folder):
    result = run(command("export", str(folder)))
    assert result.returncode == 0, result.stderr
    return (folder / "export" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path):
    whole = run(recipe(tmp_path, "whole"))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    with subprocess.Popen(recipe(tmp_path, "parts"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for_step(tmp_path / "parts", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    stopped = summary(tmp_path / "parts")
    assert stopped["outcome"] == "stopped"
    assert 0 < stopped["steps"] < 12
    assert str(stopped["steps"]) in stopped["checkpoints"]
    resumed = run(command("run", "--resume", str(tmp_path / "parts")))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    first, second = summary(tmp_path / "whole"), summary(tmp_path / "parts")
    assert second["outcome"] == "finished"
    assert first["evaluations"] == second["evaluations"]
    assert first["staleness"] == second["staleness"] == {"mean": 0.0, "max": 0}
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")


def wait_for_step(folder, process):
    """Return when some steps were trained: the policy replica says so in no log, but its weights are published."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None
        log = folder / "logs" / "policy-0.jsonl"
        if log.exists() and "generation 1" in log.read_text():
            time.sleep(0.3)
            return
        time.sleep(0.05)
    raise AssertionError(os.listdir(folder))
