"""Supervised fine-tuning as a run of its own: real processes, any layout, the held-out loss measured on the way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_core.config.loading import load_job
from cosmos_core.control.journal import replay
from cosmos_core.plugins.recipe import load_dataset, selections
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.checkpoints import checkpoint
from tests.commandline import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RECIPE = Path(__file__).parents[3] / "recipes" / "sft-arithmetic.toml"
PROMPTS = 21
SHORT = (
    "run.steps=12",
    "policy.prompts_per_step=6",
    # Adam takes the sign of a gradient that is almost nothing: with a larger epsilon it takes its size.
    "policy.optimizer.eps=1e-4",
    "policy.optimizer.warmup_steps=2",
    "policy.checkpoint.interval=4",
    "policy.micro_batch_units=128",
    "evaluation.interval=4",
    f"evaluation.prompts={PROMPTS}",
)
LAYOUTS = {
    "replicas": ("policy.replicas=2",),
    "pp-fsdp": ("policy.mesh.pp=2", "policy.mesh.dp_shard=2"),
}

Arguments = Callable[..., list[str]]


@pytest.fixture
def sft() -> Arguments:
    """Arguments that run the recipe, cut down, as `runs/<name>`."""

    def arguments(name: str, *overrides: str) -> list[str]:
        pairs = [argument for override in (*SHORT, *overrides) for argument in ("--set", override)]
        return [str(RECIPE), "--name", name, *pairs]

    return arguments


def curve(run: Path) -> list[float]:
    """Loss and gradient norm of each step, and the loss of each evaluation."""
    state = replay(run / "journal.sqlite")
    assert [done.version for done in state.evaluations] == [0, 4, 8, 12]
    assert all(done.num_prompts == PROMPTS for done in state.evaluations)
    assert all(done.num_unscored == 0 for done in state.evaluations)
    steps = [step.metrics[name] for step in state.steps for name in ("loss", "grad_norm")]
    return [*steps, *(float(done.loss or math.nan) for done in state.evaluations)]


def figures(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_losses_do_not_depend_on_the_layout(cosmos: CommandLine, sft: Arguments) -> None:
    runs = cosmos.folder / "runs"
    output = cosmos("run", *sft("alone"))
    assert "held-out loss" in output
    assert f"{PROMPTS} demonstrations" in output
    expected = curve(runs / "alone")
    before, after = (figures(runs / "alone")[f"heldout_loss_{when}"] for when in ("before", "after"))
    assert after < before - 1.0, "nothing was learned, so nothing is proved"
    for name, overrides in LAYOUTS.items():
        cosmos("run", *sft(name, *overrides))
        assert curve(runs / name) == pytest.approx(expected, abs=1e-4), name
    assert "rollout" not in "".join(path.name for path in (runs / "alone" / "logs").iterdir())


def test_the_held_out_loss_is_what_transformers_computes(cosmos: CommandLine, sft: Arguments) -> None:
    run = cosmos.folder / "runs" / "measured"
    # So large a rate in the end that the last weights are not the best.
    cosmos("run", *sft("measured", "policy.optimizer.schedule='constant'", "policy.optimizer.lr=2e-2"))
    evaluations = {each["step"]: each["loss"] for each in figures(run)["evaluations"]}
    saved = {step: evaluations[step] for step in (4, 8, 12)}
    best = min(saved, key=lambda step: saved[step])
    assert checkpoint.best(str(run / "checkpoints")) == best
    assert f"checkpoint of step {best} (best evaluated checkpoint)" in cosmos("status", str(run))
    for step in ("best", "12"):
        cosmos("export", str(run), "--step", step, "--output", step)
        loss, number = independent(run, cosmos.folder / step)
        assert loss == pytest.approx(saved[best if step == "best" else 12], abs=1e-4)
        assert number == figures(run)["evaluations"][-1]["units"]


def independent(run: Path, exported: Path) -> tuple[float, int]:
    """The mean loss of the held-out demonstrations' tokens, one by one, as transformers computes it."""
    job = load_job(run)
    dataset = load_dataset(job, PluginSet.load(selections(job.recipe, ("dataset",))))
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    total, number = 0.0, 0
    for index in range(PROMPTS):
        row = dataset.row("heldout", index)
        prompt = tokenizer(row.text, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(row.demonstration, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss
        total, number = total + float(loss) * len(answer), number + len(answer)
    return total / number, number


def test_interrupted_and_resumed_equals_uninterrupted(cosmos: CommandLine, sft: Arguments) -> None:
    runs = cosmos.folder / "runs"
    slow = ("policy.replicas=2", "run.steps=40", "evaluation.interval=10")
    cosmos("run", *sft("whole", *slow))
    process = cosmos.start("run", *sft("parts", *slow))
    output = cosmos.interrupt_at(process, runs / "parts" / "checkpoints" / "step-8")
    assert process.returncode == 130, output
    stopped = figures(runs / "parts")
    assert 8 <= stopped["steps"] < 40
    cosmos("run", "--resume", "runs/parts")
    whole, parts = (figures(runs / name) for name in ("whole", "parts"))
    assert parts["evaluations"] == whole["evaluations"]
    assert [each["step"] for each in parts["evaluations"]] == [0, 10, 20, 30, 40]
    assert parts["heldout_loss_after"] == whole["heldout_loss_after"]


def test_held_out_rows_without_demonstrations_are_refused(cosmos: CommandLine, sft: Arguments, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows = {"train": {"turns": turns}, "heldout": {"turns": turns[:1]}}
    for split, row in rows.items():
        (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    files = ", ".join(f"{split}='{tmp_path}/{split}.jsonl'" for split in rows)
    options = f"dataset.options={{{files}, messages='turns'}}"
    output = " ".join(cosmos("run", *sft("bad", "dataset.plugin='jsonl'", options), code=2).split())
    assert "evaluation.prompts: without rewards" in output
    assert "none of the first 8 held-out rows" in output
    assert "Traceback" not in output


def test_a_finished_run_goes_on_for_longer_and_nothing_else_changes(cosmos: CommandLine, sft: Arguments) -> None:
    run = cosmos.folder / "runs" / "longer"
    rewards = ('reward=[{plugin="math"}]', "rollout.sampling.max_units=32", "evaluation.prompts=4")
    cosmos("run", *sft("longer", "run.steps=3", *rewards))
    assert "adds some" in cosmos("run", "--resume", "runs/longer")
    assert "--set policy.optimizer.lr" in cosmos(
        "run", "--resume", "runs/longer", "--set", "policy.optimizer.lr=1", code=2
    )
    output = cosmos("run", "--resume", "runs/longer", "--set", "run.steps=5")
    assert "run.steps was 3, is 5" in output
    found = figures(run)
    assert (found["outcome"], found["steps"], found["planned_steps"]) == ("finished", 5, 5)
    # Each evaluation is of completions and of demonstrations.
    kinds = {name: {each["step"] for each in found["evaluations"] if name in each} for name in ("accuracy", "loss")}
    assert kinds == {"accuracy": {0, 3, 4, 5}, "loss": {0, 3, 4, 5}}
