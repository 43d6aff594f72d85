"""The demo's recipe, cut down, with two replicas of each kind: what it leaves, and what its model is good for."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.commandline import CommandLine
from tests.runs import arithmetic

pytestmark = pytest.mark.timeout(400)

REPLICAS = ("policy-0", "policy-1", "rollout-0", "rollout-1")


@pytest.fixture(scope="module")
def run(cosmos: CommandLine, runs: Path) -> Path:
    """The folder of a run that has finished."""
    wide = ("policy.replicas=2", "rollout.replicas=2", "sync.max_staleness=2", "tracking.hooks=['mlflow']")
    cosmos("run", *arithmetic("wide", *wide))
    return runs / "wide"


@pytest.fixture(scope="module")
def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def exported(cosmos: CommandLine, run: Path) -> Path:
    """The model that it trained, as a Hugging Face folder."""
    cosmos("export", str(run), "--output", "model")
    return cosmos.folder / "model"


def test_every_sample_is_accounted_for(summary: dict[str, Any]) -> None:
    samples = summary["samples"]
    assert summary["outcome"] == "finished"
    assert samples["consumed"] == 8 * 16 * 8
    assert samples["generated"] == samples["consumed"] + sum(samples["dropped"].values())
    assert summary["staleness"]["max"] <= 2


def test_no_process_logs_an_error(run: Path) -> None:
    for name in ("controller", *REPLICAS):
        log = (run / "logs" / f"{name}.jsonl").read_text()
        assert '"ERROR"' not in log, log


def test_its_files_are_where_the_readme_says(run: Path) -> None:
    report = (run / "report.html").read_text()
    assert 'class="plot"' in report
    assert 'http-equiv="refresh"' not in report
    assert 'src="http' not in report
    for name in ("summary.json", "mlflow.db", "journal.sqlite", "recipe.resolved.toml", "manifest.json", "checkpoints"):
        assert (run / name).exists(), name


def test_mlflow_has_its_metrics(run: Path) -> None:
    with sqlite3.connect(run / "mlflow.db") as database:
        names = {name for (name,) in database.execute("select distinct key from metrics")}
        steps = database.execute("select max(step) from metrics").fetchone()[0]
    assert steps == 20
    assert any("reward" in name for name in names), names
    assert any("loss" in name for name in names), names


def test_each_sample_can_be_read_with_what_became_of_it(cosmos: CommandLine, run: Path) -> None:
    found = [json.loads(line) for line in cosmos("samples", str(run), "--json").splitlines()]
    assert len({(each["lease"], each["index"]) for each in found}) == len(found)
    assert f"{len(found):,} samples are kept, and the run's journal counts {len(found):,}\n" in cosmos(
        "samples", str(run)
    )
    batches = {
        group["lease"]: step["step"]
        for step in json.loads(cosmos("audit", str(run), "--json"))["steps"]
        for group in step["prompts"]
        if step["stage"] == 1
    }
    consumed = [each for each in found if each["lease"] in batches]
    assert len(consumed) == 8 * 16 * 8
    assert all(each["step"] == batches[each["lease"]] and each["advantage"] is not None for each in consumed)
    assert all(len(each["units"]) == len(each["logprobs"]) == each["num_units"] > 0 for each in found)
    assert {each["replica"] for each in found} == {"rollout-0", "rollout-1"}
    assert len(list((run / "samples").iterdir())) <= 4


def test_its_journal_proves_that_each_prompt_was_consumed_once(cosmos: CommandLine, run: Path) -> None:
    audited = json.loads(cosmos("audit", str(run), "--json"))
    assert audited["problems"] == []
    assert [step["step"] for step in audited["steps"]] == list(range(1, 21))
    assert "Each prompt was consumed exactly once" in cosmos("audit", str(run))


def test_status_says_how_it_ended(cosmos: CommandLine, run: Path) -> None:
    assert "finished" in cosmos("status", str(run))


def test_its_model_completes_alike_in_transformers(cosmos: CommandLine, exported: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    question = "Ann has 7 apples, buys 5 more, then loses 4. How many apples now?\n"
    shown = cosmos("generate", str(exported), question, "--max-units", "24")
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer(question, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(inputs["input_ids"], max_new_tokens=24, do_sample=False)
    expected = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert expected.strip() in shown


def test_it_is_scored_again(cosmos: CommandLine, run: Path) -> None:
    assert "accuracy" in cosmos("eval", str(run), "--prompts", "16")


def test_its_folder_is_not_written_over(cosmos: CommandLine, run: Path) -> None:
    assert "--resume" in cosmos("run", *arithmetic(run.name), code=2)
    assert "Nothing to resume" in cosmos("run", "--resume", str(run))
