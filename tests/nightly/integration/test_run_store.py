"""A run whose checkpoints and export are in a bucket, and the plan of another that begins with the model there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cosmos_core.policy.checkpoints import checkpoint
from cosmos_core.storage import fetch_model
from tests.commandline import CommandLine

pytest.importorskip("moto", reason="needs moto, which `make` installs")
pytest.importorskip("s3fs", reason="needs cosmos-core[s3], which `make` installs")

from tests.buckets import SECRET, BucketServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMON = """
[algorithm]
plugin = "sft"
[dataset]
plugin = "arithmetic"
[policy]
prompts_per_step = 4
micro_batch_units = 256
precision = "fp32"
device = "cpu"
[policy.optimizer]
lr = 5e-3
[evaluation]
prompts = 0
"""
FIRST = f"""
[run]
name = "first"
steps = 2
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
max_position_embeddings = 256
tie_word_embeddings = true
[model.tokenizer]
corpus_rows = 200
{COMMON}
[policy.checkpoint]
url = "s3://models/of/a/run"
"""
SECOND = f"""
[run]
name = "second"
steps = 2
[model]
plugin = "hf"
path = "s3://models/export"
{COMMON}
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[BucketServer]:
    """Buckets, with their credentials in the environment."""
    server = BucketServer()
    server.start()
    server.make_bucket("models")
    for name, value in server.credentials.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    yield server
    server.stop()


@pytest.fixture
def arguments_seen() -> Iterator[Callable[[], str]]:
    """The arguments of all processes that this one and its children start."""
    seen: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            for child in psutil.Process().children(recursive=True):
                try:
                    seen.add(" ".join(child.cmdline()))
                except psutil.Error:
                    continue

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield lambda: "\n".join(seen)
    over.set()
    thread.join()


def test_a_run_keeps_its_checkpoints_and_its_model_in_a_bucket(
    cosmos: CommandLine, server: BucketServer, arguments_seen: Callable[[], str]
) -> None:
    where = "s3://models/of/a/run"
    for name, recipe in (("first", FIRST), ("second", SECOND)):
        (cosmos.folder / f"{name}.toml").write_text(recipe)
    cosmos("run", "first.toml")
    run = cosmos.folder / "runs" / "first"
    assert checkpoint.completed(where) == [2]
    assert not (run / "checkpoints").exists()

    assert "Exported step 2 to s3://models/export" in cosmos("export", str(run), "--to", "s3://models/export")
    assert not list(run.glob(".export*"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in fetch_model("s3://models/export").iterdir()
    }

    # Fails if config, tokenizer or weights cannot be read from the copy.
    cosmos("plan", "second.toml")

    told = [path for path in cosmos.folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not told, "the secret is in a file"
    assert "cosmos_core" in arguments_seen()
    assert SECRET not in arguments_seen()
