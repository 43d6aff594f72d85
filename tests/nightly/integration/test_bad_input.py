"""What users get wrong: refused before any process starts, in one clear message."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_core.models.tokenizer import build_tokenizer
from tests.commandline import CommandLine

Arguments = Callable[..., list[str]]
pytestmark = pytest.mark.timeout(400)


def refused(cosmos: CommandLine, arithmetic: Arguments, *overrides: str, code: int = 2) -> str:
    output = cosmos("run", *arithmetic("bad", *overrides), code=code)
    assert "Traceback" not in output
    return " ".join(output.split())


def test_an_unknown_key_names_the_nearest(cosmos: CommandLine, arithmetic: Arguments) -> None:
    assert "did you mean steps" in refused(cosmos, arithmetic, "run.stepps=3")


def test_a_recipe_that_is_not_there(cosmos: CommandLine) -> None:
    output = cosmos("run", "nowhere.toml", code=2)
    assert "nowhere.toml" in output
    assert "Traceback" not in output


def test_a_dataset_of_no_rows(cosmos: CommandLine, arithmetic: Arguments, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    options = f"dataset.options={{train='{tmp_path}/empty.jsonl', prompt='$question'}}"
    output = refused(cosmos, arithmetic, "dataset.plugin='jsonl'", options, "evaluation.prompts=0", code=3)
    assert "empty.jsonl: empty; give a source that has rows" in output


def test_a_port_in_use(cosmos: CommandLine, arithmetic: Arguments, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = refused(cosmos, arithmetic, f"control.port={port}")
    assert str(port) in output
    assert "control.port" in output
    assert not (tmp_path / "runs" / "bad").exists()


def test_a_run_folder_that_exists(cosmos: CommandLine, arithmetic: Arguments, tmp_path: Path) -> None:
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "job.json").write_text("{}")
    assert "--resume" in refused(cosmos, arithmetic)


def test_a_plan_starts_nothing(cosmos: CommandLine, arithmetic: Arguments, tmp_path: Path) -> None:
    output = cosmos("plan", *arithmetic("dry"))
    for part in ("policy", "rollout", "controller", "MiB"):
        assert part in output
    assert not (tmp_path / "runs" / "dry" / "journal.sqlite").exists()


def test_a_mesh_that_does_not_fit_names_the_number(cosmos: CommandLine, arithmetic: Arguments) -> None:
    output = refused(cosmos, arithmetic, "policy.mesh.tp=3", "policy.mesh.pp=9", "policy.mesh.ep=2")
    assert "policy.mesh.ep: 2, but Qwen3ForCausalLM cannot be spread over ep: it has no experts" in output
    output = refused(cosmos, arithmetic, "policy.mesh.tp=3", "policy.mesh.pp=9")
    assert "policy.mesh.tp: 3 does not divide 4 attention heads" in output
    assert "pp = 9 makes 9 stages of" in output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.config.num_attention_heads=5", "num_attention_heads = 5, num_key_value_heads = 2"),
        ("model.config.num_key_value_heads=0", "the config makes no model"),
        ("policy.float8={scaling='rowwise', skip=['lm_hed']}", "has 'lm_hed' in its name; did you mean lm_head?"),
        ("policy.lora={modules=['q_prj']}", "is called 'q_prj'; did you mean q_proj?"),
    ],
)
def test_what_the_model_cannot_be_is_refused(
    cosmos: CommandLine, arithmetic: Arguments, override: str, message: str
) -> None:
    assert message in refused(cosmos, arithmetic, override)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model in several files."""
    folder = tmp_path / "checkpoint"
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, **heads))
    module.save_pretrained(folder, max_shard_size="20KB")
    build_tokenizer(["3 + 4"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True}).save_pretrained(folder)
    return folder


def plan_of(cosmos: CommandLine, path: Path, *, code: int = 3) -> str:
    """What `cosmos plan` says of a checkpoint."""
    names = ("--model", "qwen", "--algorithm", "sft", "--dataset", "arithmetic")
    settings = (f"model.path='{path}'", "evaluation.prompts=0", "policy.prompts_per_step=8", "policy.optimizer.lr=1e-6")
    pairs = [argument for setting in settings for argument in ("--set", setting)]
    output = cosmos("plan", *names, *pairs, code=code)
    assert "Traceback" not in output
    return " ".join(output.split())


def cut(folder: Path) -> str:
    file = folder / "model-00002-of-00007.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return f"is truncated or no safetensors file, with {file.stat().st_size:,} bytes"


def lost(folder: Path) -> str:
    (folder / "model-00002-of-00007.safetensors").unlink()
    return "model-00002-of-00007.safetensors is missing;"


def foreign(folder: Path) -> str:
    (folder / "model-00002-of-00007.safetensors").write_text("no safetensors, but a file of that name")
    return "is truncated or no safetensors file, with 39 bytes"


@pytest.mark.parametrize("damage", [cut, lost, foreign])
def test_a_damaged_checkpoint_names_the_file(
    cosmos: CommandLine, checkpoint: Path, damage: Callable[[Path], str]
) -> None:
    message = damage(checkpoint)
    assert message in plan_of(cosmos, checkpoint)


def test_a_folder_with_checkpoints_of_another_run(cosmos: CommandLine, arithmetic: Arguments, tmp_path: Path) -> None:
    (tmp_path / "shared" / "step-7").mkdir(parents=True)
    (tmp_path / "shared" / "step-7" / "complete.json").write_text("{}")
    output = refused(cosmos, arithmetic, f"policy.checkpoint.url='{tmp_path}/shared'")
    assert "has 1 checkpoints already, the newest of step 7" in output
