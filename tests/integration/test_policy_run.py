"""Real processes: one controller and policy replicas that imitate demonstrations."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.loading import load_recipe, save_job
from cosmos_core.plugin.roles import load_dataset, load_model, selections
from cosmos_core.plugin.selection import PluginSet
from cosmos_core.policy.checkpoint import completed

torch.set_num_threads(1)

RECIPE = """
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


def prepare(folder, *overrides):
    (folder / "recipe.toml").write_text(RECIPE)
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


@pytest.fixture
def run():
    started = []

    def start(job, *command):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = (job.directory / f"{len(started)}.txt").open("w")
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--run", str(job.directory)], stdout=log, stderr=log, env=environment
        )
        log.close()
        started.append(process)
        return process

    def whole(job, *, replicas, resume_step=None):
        address = job.directory / "controller.json"
        address.unlink(missing_ok=True)
        resume = [] if resume_step is None else ["--resume-step", str(resume_step)]
        controller = start(job, "cosmos_core.controller", *resume)
        deadline = time.monotonic() + 30
        while not address.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        at = json.loads(address.read_text())["address"]
        checkpoint = [] if resume_step is None else ["--checkpoint", f"{job.checkpoints}/step-{resume_step}"]
        policies = [
            start(job, "cosmos_core.policy", "--name", f"policy-{index}", "--controller", at, *checkpoint)
            for index in range(replicas)
        ]
        assert [process.wait(90) for process in (*policies, controller)] == [0] * (replicas + 1)

    yield whole
    for process in started:
        process.kill()
        process.wait()


def state_of(job, step):
    from cosmos_core.plugin.roles import load_model
    from cosmos_core.policy.__main__ import make_trainer, stage_starter
    from cosmos_core.policy.restoring import restore

    plugins = PluginSet.load(selections(job.recipe, ("model", "algorithm", "dataset")))
    trainer = make_trainer(job, load_model(job, plugins))
    begin = stage_starter(job, plugins, trainer)
    begin(0)
    restore(trainer, f"{job.checkpoints}/step-{step}", begin)
    assert trainer.step == step
    return trainer.state()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_replica_resumed_has_the_bits_of_one_never_interrupted_and_two_agree(run, tmp_path):
    folders = [tmp_path / name for name in ("whole", "pair")]
    for folder in folders:
        folder.mkdir()
    whole, pair = prepare(folders[0]), prepare(folders[1], "policy.replicas=2")
    run(whole, replicas=1)
    assert completed(whole.checkpoints) == [4, 8, 12]
    expected = {name: tensor.clone() for name, tensor in state_of(whole, 12).items()}
    run(whole, replicas=1, resume_step=4)
    again = state_of(whole, 12)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())

    run(pair, replicas=2)
    for name, tensor in state_of(pair, 12).items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-4, rtol=1e-2)
