"""The main job with real processes: it scales out, exports, leaves its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_core.testing import CommandLine

Arguments = Callable[..., list[str]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def summary(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text())


def test_two_replicas_of_each_kind_account_for_every_sample(cosmos: CommandLine, arithmetic: Arguments) -> None:
    cosmos("run", *arithmetic("wide", "policy.replicas=2", "rollout.replicas=2", "sync.max_staleness=2"))
    result = summary(cosmos.folder / "runs" / "wide")
    samples = result["samples"]
    assert result["outcome"] == "finished"
    assert isinstance(samples, dict)
    assert samples["consumed"] == 8 * 16 * 8
    assert samples["generated"] == samples["consumed"] + sum(samples["dropped"].values())
    assert result["staleness"]["max"] <= 2  # type: ignore[index]
    for name in ("controller", "policy-0", "policy-1", "rollout-0", "rollout-1"):
        log = (cosmos.folder / "runs" / "wide" / "logs" / f"{name}.jsonl").read_text()
        assert '"ERROR"' not in log, log


def test_an_exported_model_completes_alike_in_transformers(cosmos: CommandLine, arithmetic: Arguments) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cosmos("run", *arithmetic("small"))
    run, folder = cosmos.folder / "runs" / "small", cosmos.folder / "model"
    cosmos("export", str(run), "--output", str(folder))
    question = "Ann has 7 apples, buys 5 more, then loses 4. How many apples now?\n"
    shown = cosmos("generate", str(folder), question, "--max-units", "24")

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(question, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(inputs["input_ids"], max_new_tokens=24, do_sample=False)
    expected = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert expected.strip() in shown

    assert "accuracy" in cosmos("eval", str(run), "--prompts", "16")


def test_the_files_of_a_run_are_where_the_readme_says(cosmos: CommandLine, arithmetic: Arguments) -> None:
    cosmos("run", *arithmetic("files", "tracking.hooks=['mlflow']"))
    run = cosmos.folder / "runs" / "files"
    report = (run / "report.html").read_text()
    assert "<svg" in report
    assert "http-equiv" not in report
    assert 'src="http' not in report
    for name in ("summary.json", "mlflow.db", "journal.sqlite", "recipe.resolved.toml", "manifest.json", "checkpoints"):
        assert (run / name).exists(), name
    import sqlite3

    with sqlite3.connect(run / "mlflow.db") as database:
        names = {name for (name,) in database.execute("select distinct key from metrics")}
        steps = database.execute("select max(step) from metrics").fetchone()[0]
    assert steps == 20
    assert any("reward" in name for name in names), names
    assert any("loss" in name for name in names), names
