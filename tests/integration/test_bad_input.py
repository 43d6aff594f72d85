"""What users get wrong: refused before any process starts, in one clear message."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_core.testing import CommandLine

Arguments = Callable[..., list[str]]
pytestmark = pytest.mark.timeout(120)


def refused(cosmos: CommandLine, arithmetic: Arguments, *overrides: str, code: int = 2) -> str:
    output = cosmos("run", *arithmetic("bad", *overrides), code=code)
    assert "Traceback" not in output
    return " ".join(output.split())


def test_an_unknown_key_names_the_nearest(cosmos: CommandLine, arithmetic: Arguments) -> None:
    assert "did you mean steps" in refused(cosmos, arithmetic, "run.stepps=3")


def test_an_unknown_option_of_a_plugin_names_its_path(cosmos: CommandLine, arithmetic: Arguments) -> None:
    output = refused(cosmos, arithmetic, "algorithm.options.aggregatoin='token-mean'")
    assert "algorithm.options.aggregatoin" in output
    assert "aggregation" in output


def test_an_unknown_plugin_names_the_nearest_and_how_to_install(cosmos: CommandLine, arithmetic: Arguments) -> None:
    assert "grpo" in refused(cosmos, arithmetic, "algorithm.plugin='gpro'")


def test_a_recipe_that_is_not_there(cosmos: CommandLine) -> None:
    output = cosmos("run", "nowhere.toml", code=2)
    assert "nowhere.toml" in output
    assert "Traceback" not in output


def test_a_dataset_of_no_rows(cosmos: CommandLine, arithmetic: Arguments, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    options = f"dataset.options={{train=['{tmp_path}/empty.jsonl']}}"
    output = refused(cosmos, arithmetic, "dataset.plugin='jsonl'", options, "evaluation.prompts=0")
    assert "empty.jsonl" in output


def test_a_vocabulary_smaller_than_the_tokenizer(cosmos: CommandLine, arithmetic: Arguments) -> None:
    output = refused(cosmos, arithmetic, "model.config.vocab_size=300")
    assert "300" in output
    assert "tokenizer" in output


def test_completions_longer_than_the_context(cosmos: CommandLine, arithmetic: Arguments) -> None:
    assert "context" in refused(cosmos, arithmetic, "rollout.sampling.max_units=256")


def test_a_port_in_use(cosmos: CommandLine, arithmetic: Arguments) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = refused(cosmos, arithmetic, f"control.port={port}", code=1)
    assert str(port) in output
    assert "control.port" in output


def test_a_run_folder_that_exists(cosmos: CommandLine, arithmetic: Arguments, tmp_path: Path) -> None:
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "job.json").write_text("{}")
    assert "--resume" in refused(cosmos, arithmetic)


def test_a_plan_starts_nothing(cosmos: CommandLine, arithmetic: Arguments, tmp_path: Path) -> None:
    output = cosmos("plan", *arithmetic("dry"))
    for part in ("policy", "rollout", "controller", "MiB"):
        assert part in output
    assert not (tmp_path / "runs" / "dry" / "journal.sqlite").exists()
