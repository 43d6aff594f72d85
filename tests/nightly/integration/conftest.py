"""Runs of the demo's recipe, cut down to seconds, and policy replicas that imitate demonstrations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.loading import load_recipe, save_job
from cosmos_core.config.mesh import world_size
from cosmos_core.plugins.recipe import load_dataset, load_model, selections
from cosmos_core.plugins.selection import PluginSet
from tests.commandline import CommandLine
from tests.processes import Forked, ForkedCommandLine
from tests.runs import arithmetic


@pytest.fixture
def cosmos(tmp_path: Path) -> Iterator[CommandLine]:
    """`cosmos` in a folder with modules that no process of a run may import."""
    for name in ("queue.py", "cosmos_algorithm_grpo.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the current folder')\n")
    command = ForkedCommandLine(tmp_path)
    yield command
    left = command.left_behind()
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"


@pytest.fixture(name="arithmetic")
def arithmetic_() -> Callable[..., list[str]]:
    """Arguments that run the demo's recipe, cut down, as `runs/<name>`."""
    return arithmetic


IMITATION = """
[run]
name = "imitation"
steps = 12
seed = 3
[model]
plugin = "hf"
[model.config]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
max_position_embeddings = 128
tie_word_embeddings = true
initializer_range = 0.06
[model.tokenizer]
corpus_rows = 200
[algorithm]
plugin = "sft"
[dataset]
plugin = "arithmetic"
[policy]
precision = "fp32"
prompts_per_step = 8
device = "cpu"
[policy.optimizer]
lr = 5e-3
schedule = "linear"
warmup_steps = 3
[policy.checkpoint]
interval = 4
keep = 9
[evaluation]
prompts = 0
"""


@pytest.fixture
def imitation() -> Callable[..., Job]:
    """Prepare a run that imitates demonstrations of arithmetic, in a folder, with overrides of its recipe."""

    def prepare(folder: Path, *overrides: str) -> Job:
        folder.mkdir(exist_ok=True)
        (folder / "recipe.toml").write_text(IMITATION)
        recipe = load_recipe(folder / "recipe.toml", overrides=[f"run.output_dir='{folder}'", *overrides])
        job = Job(
            run_id=folder.name,
            directory=folder / "imitation",
            recipe_directory=folder,
            recipe=recipe,
            num_train_rows=500,
            num_heldout_rows=0,
            num_evaluation_prompts=0,
            uses_rollouts=False,
            stages=(StageFacts(source="demonstrations"),),
        )
        job.directory.mkdir()
        plugins = PluginSet.load(selections(recipe, ("model", "dataset", "algorithm")))
        rows = [load_dataset(job, plugins).row("train", index) for index in range(200)]
        load_model(job, plugins).prepare(
            [f"{row.text}{row.demonstration}" for row in rows],
            {"build": "byte-bpe", "vocab_size": 400, "split_digits": True},
        )
        save_job(job)
        return job

    return prepare


Process: TypeAlias = "subprocess.Popen[bytes] | Forked"


class Processes:
    """A controller and policy replicas, started by hand."""

    def __init__(self) -> None:
        self.started: list[Process] = []

    def controller(self, job: Job, *, resume_step: int | None = None) -> Process:
        """Start the controller, and wait until it listens."""
        address = job.directory / "controller.json"
        address.unlink(missing_ok=True)
        resume = [] if resume_step is None else ["--resume-step", str(resume_step)]
        process = self._start(job, "-m", "cosmos_core.control", *resume)
        deadline = time.monotonic() + 60
        while not address.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    def policy(self, job: Job, index: int, *more: str, code: dict[int, str] | None = None) -> list[Process]:
        """Start all processes of a replica; `code` replaces the program of some ranks."""
        address = json.loads((job.directory / "controller.json").read_text())["address"]
        found = []
        for rank in range(world_size(job.recipe.policy.mesh)):
            name = f"policy-{index}.{rank}" if rank else f"policy-{index}"
            program = ("-c", code[rank]) if code and rank in code else ("-m", "cosmos_core.policy")
            place = ("--rank", str(rank), "--session", "of this test")
            found.append(self._start(job, *program, "--name", name, "--controller", address, *place, *more))
        return found

    def _start(self, job: Job, *command: str) -> Process:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = (*command, "--run", str(job.directory))
        log = job.directory / f"{len(self.started)}.txt"
        log.touch()
        process: Process
        if command[0] == "-m":
            process = Forked(command[1], command[2:], cwd=Path.cwd(), environment=environment, output=log)
        else:
            with log.open("w") as output:
                process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, env=environment)
        self.started.append(process)
        return process


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes of one run; none outlives the test."""
    found = Processes()
    yield found
    for process in found.started:
        process.kill()
        process.wait()
        if isinstance(process, Forked):
            process.stdout.close()
