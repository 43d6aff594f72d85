"""Damage to the files of a run that is resumed: each is refused by name, or the run ends with the same weights.

`pytest -s tests/nightly/integration/test_run_damaged.py` prints what was damaged, and what became of it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from cosmos_core.policy.checkpoints.reader import CheckpointReader, load_shares
from cosmos_core.weights.shards import local_shards
from tests.commandline import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

RECIPE = """
[run]
name = "whole"
steps = 4
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
[algorithm]
plugin = "sft"
[dataset]
plugin = "arithmetic"
[policy]
prompts_per_step = 4
micro_batch_units = 256
precision = "fp32"
device = "cpu"
[policy.mesh]
dp_shard = 2
[policy.checkpoint]
interval = 2
keep = 3
[policy.optimizer]
lr = 5e-3
[evaluation]
prompts = 4
"""

Damage = Callable[[bytes], bytes | None]


def flip(place: bytes | float, *, after: int = 0) -> Damage:
    """Flips one bit: of the byte so far behind the only place of some bytes, or at a fraction of the file."""

    def damage(content: bytes) -> bytes:
        at = content.rindex(place) + after if isinstance(place, bytes) else int(place * len(content))
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return damage


def cut(content: bytes) -> bytes:
    """Loses its end."""
    return content[: len(content) * 3 // 4]


def gone(_: bytes) -> None:
    """Loses the file."""


def zeros(content: bytes) -> bytes:
    """Loses what a sector of the disk held."""
    begin = len(content) // 8192 * 4096
    return content[:begin] + bytes(4096) + content[begin + 4096 :]


NEWEST, BEFORE = "checkpoints/step-4", "checkpoints/step-2"
CASES: list[tuple[str, str, Damage]] = [
    (f"{NEWEST}/__0_0.distcp", "a bit, in the middle", flip(0.5)),
    (f"{NEWEST}/__0_0.distcp", "a bit, at its beginning", flip(0.01)),
    (f"{NEWEST}/__0_0.distcp", "a bit, at its end", flip(0.97)),
    (f"{NEWEST}/__0_0.distcp", "a sector of zeros", zeros),
    (f"{NEWEST}/__0_0.distcp", "cut", cut),
    (f"{NEWEST}/__0_0.distcp", "gone", gone),
    (f"{NEWEST}/__1_0.distcp", "a bit of the optimizer", flip(0.4)),
    (f"{NEWEST}/__1_0.distcp", "a bit, of a directory of its parts", flip(b"PK\x01\x02", after=42)),
    (f"{NEWEST}/__1_0.distcp", "a sector of zeros", zeros),
    (f"{NEWEST}/__1_0.distcp", "cut", cut),
    (f"{NEWEST}/.metadata", "a bit", flip(0.3)),
    (f"{NEWEST}/.metadata", "a bit, near its end", flip(0.9)),
    (f"{NEWEST}/.metadata", "cut", cut),
    (f"{NEWEST}/.metadata", "gone", gone),
    (f"{NEWEST}/complete.json", "a bit, of the stage", flip(b'"stage": 0', after=9)),
    (f"{NEWEST}/complete.json", "a bit, of the generation", flip(b'"generation": 1', after=14)),
    (f"{NEWEST}/complete.json", "cut", cut),
    (f"{NEWEST}/complete.json", "gone", gone),
    (f"{BEFORE}/__0_0.distcp", "a bit", flip(0.5)),
    (f"{BEFORE}/complete.json", "a bit", flip(0.5)),
    ("checkpoints/best.json", "a bit", flip(0.8)),
    ("journal.sqlite", "a bit", flip(0.6)),
    ("journal.sqlite", "a bit, of its header", flip(b"SQLite format 3", after=3)),
    ("journal.sqlite", "cut", cut),
    ("journal.sqlite", "gone", gone),
    ("recovery/step-4", "a bit", flip(0.5)),
    ("recovery/step-4", "gone", gone),
    ("job.json", "a bit, of the seed", flip(b'"seed": ', after=8)),
    ("job.json", "cut", cut),
    ("job.json", "gone", gone),
    ("recipe.resolved.toml", "a bit", flip(0.5)),
    ("manifest.json", "a bit, of a plugin's hash", flip(b'"sha256": "', after=20)),
    ("manifest.json", "cut", cut),
    ("manifest.json", "gone", gone),
    ("assets/tokenizer.json", "a bit", flip(0.7)),
    ("assets/tokenizer.json", "gone", gone),
    ("assets/config.json", "a bit", flip(0.5)),
    ("keys/policy.key", "a bit, of the secret", flip(b'secret = "', after=15)),
    ("keys/allowed.toml", "gone", gone),
    ("summary.json", "a bit", flip(0.5)),
    ("controller.json", "cut", cut),
    ("export/model.safetensors", "a bit", flip(0.5)),
]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Everything that the last checkpoint holds."""
    path = str(run / "checkpoints" / "step-6")
    described = CheckpointReader(path).read_metadata().state_dict_metadata
    found = {name: torch.zeros(each.size, dtype=each.properties.dtype) for name, each in described.items()}
    load_shares(path, local_shards(found))
    return found


def resumed(cosmos: CommandLine, run: Path, *more: str) -> tuple[int, str]:
    """The exit code of a run that goes on to step 6, and what it said."""
    process = cosmos.start("run", "--resume", str(run), "--set", "run.steps=6", *more)
    said = process.communicate(timeout=cosmos.timeout_s)[0]
    return process.wait(), " ".join(said.split())


def refusal(said: str, run: Path) -> str:
    """The words that refuse, without the folder."""
    told = re.search(r"cosmos: (.*)|with starting and ending (.*) Result", said)
    assert told is not None, said
    return (told[1] or told[2]).replace(f"{run}/", "").replace(str(run), "RUN")


@pytest.fixture
def whole(cosmos: CommandLine) -> Path:
    """A run of 4 steps, exported."""
    (cosmos.folder / "whole.toml").write_text(RECIPE)
    cosmos("run", "whole.toml")
    run = cosmos.folder / "runs" / "whole"
    cosmos("export", str(run))
    return run


def test_each_damage_of_a_file_is_refused_by_name_or_changes_nothing(cosmos: CommandLine, whole: Path) -> None:
    reference = shutil.copytree(whole, cosmos.folder / "reference")
    assert resumed(cosmos, reference)[0] == 0
    expected = weights_of(reference)
    table, wrong = Table("file", "damage", "what became of it"), []
    for number, (file, words, damage) in enumerate(CASES):
        run = shutil.copytree(whole, cosmos.folder / f"run-{number}")
        content = damage((run / file).read_bytes())
        (run / file).unlink() if content is None else (run / file).write_bytes(content)
        code, said = resumed(cosmos, run)
        is_same = code == 0 and all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(run).items())
        fate = "bitwise" if is_same else f"refused: {refusal(said, run)}" if code else "OTHER WEIGHTS"
        # Where it is gone a journal is named without its suffix, and a wrong key by its folder.
        word = {"journal.sqlite": "journal", "policy.key": "keys"}.get(Path(file).name, Path(file).name)
        if not is_same and (not code or word not in fate or "Traceback" in said):
            wrong.append((file, words, fate))
        if code and "--from previous" in said:
            back = resumed(cosmos, run, "--from", "previous")
            if back[0] or any(not torch.equal(tensor, expected[name]) for name, tensor in weights_of(run).items()):
                wrong.append((file, f"{words}, and then --from previous", back[1]))
            audited = json.loads(cosmos("audit", str(run), "--json"))
            assert audited["problems"] == [], (file, words)
            fate += "; bitwise with that"
        table.add_row(file, words, fate)
        shutil.rmtree(run)
    Console(width=200).print(table)
    assert not wrong
