"""One training step of a policy on one GPU: tokens/s and model FLOPs utilisation.

    python benchmarks/step.py [--shapes 0.6B,8B] [--steps 5] [--tokens 8192] [--document 2048] [--recompute none]

The trainer's own step (pack, forward, backward, clip, AdamW) on drawn weights of Qwen3's shapes, in bf16, each way in a
process of its own. Weights, gradients and moments in float32 take 16 bytes a parameter: of the 8B shape, a GPU of
141 GB holds 18 of the 36 layers, whose utilisation is that of all (125 GB by the plan, and 164 GB with 16,384 tokens).

`--device cpu --shapes tiny --tokens 512 --document 64` goes through all of it without a GPU, in float32. `--ragged`:
as many documents of lengths that are drawn, one to `2 · document` units, anew for each step; none is met twice.

Utilisation is a run's `mfu`: `ModelFacts.training_flops` / seconds / peak, that of dense bf16 products for float8 too.
Planned is what `cosmos plan` counts for such a process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import Float8Config, ParallelConfig, PolicyConfig
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, tokens_payload
from cosmos_core.policy.batches.batch import units_of
from cosmos_core.policy.processes.world import single_world
from cosmos_core.protocols import ModelContext
from cosmos_core.replica.utilisation import peak_of
from cosmos_core.run.planning.memory import RankMemory, policy_memory
from cosmos_core.testing.layouts import make_trainer, train_step
from cosmos_core.types import Payload

QWEN3: Final[Mapping[str, Any]] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "tiny untied": {
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 18,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
COMPILE: Final = ("off", "on")
FLOAT8: Final = ("none", "tensorwise", "rowwise")


@attrs.frozen(kw_only=True)
class Way:
    """A step that is measured.

    Attributes:
        shape: One of `SHAPES`.
        device: `cuda` or `cpu`.
        tokens: Of a step; forwards take at most `micro_batch` of them.
        document: Units of each of its documents, on average.
        is_ragged: Whether their lengths are drawn.
        steps: How many are measured, after two that are not.
        compile: As in a recipe, like those below.
    """

    shape: str
    device: str = "cuda"
    tokens: int = 8192
    document: int = 2048
    is_ragged: bool = False
    micro_batch: int = 8192
    steps: int = 5
    compile: str = "off"
    float8: str = "none"
    recompute: str = "none"

    def policy(self) -> PolicyConfig:
        """The recipe's part that says so."""
        return PolicyConfig(
            # Few CPUs have products of bf16.
            precision="bf16" if self.device == "cuda" else "fp32",
            micro_batch_units=min(self.tokens, self.micro_batch),
            parallel=ParallelConfig(compile=self.compile, recompute=self.recompute),
            float8=Float8Config(scaling=self.float8),
        )

    def lengths(self, number: int) -> Sequence[int]:
        """Units of the documents of a step."""
        count = self.tokens // self.document
        if not self.is_ragged:
            return [self.document] * count
        cuts = np.sort(np.random.default_rng(number).choice(np.arange(1, self.tokens // 2), count - 1, replace=False))
        # Two at least: the first of a document predicts, and is predicted by nothing.
        return [int(2 * length) for length in np.diff([0, *cuts, self.tokens // 2])]


@contextlib.contextmanager
def model_of(config: Mapping[str, Any]) -> Iterator[HuggingFaceModel]:
    """A model of a Hugging Face config, with weights that are drawn and a tokenizer of bytes."""
    with tempfile.TemporaryDirectory(prefix="cosmos-step-") as folder:
        context = ModelContext(path=None, config=config, assets=Path(folder))
        model = HuggingFaceModel(HuggingFaceOptions(), context)
        model.prepare([], {"build": "byte-bpe", "vocab_size": 300, "split_digits": False})
        yield model


def documents(lengths: Sequence[int], vocabulary: int) -> list[Payload]:
    """Sequences of as many units each, the first quarter the prompt."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, vocabulary, length + 1) for length in lengths]
    return [tokens_payload(row[: len(row) // 4 or 1], row[len(row) // 4 or 1 :]) for row in rows]


def planned(policy: PolicyConfig, model: HuggingFaceModel) -> RankMemory:
    """What `cosmos plan` counts of the first process of a policy replica that publishes nothing."""
    recipe = recipe_from(
        {
            "run": {"name": "step", "steps": 1},
            "model": {"plugin": "hf", "path": "x"},
            "policy": {"optimizer": {"lr": 1e-6}},
            **{key: {"plugin": "any"} for key in ("algorithm", "dataset")},
        }
    )
    return policy_memory(attrs.evolve(recipe, policy=policy), model.facts(), publishes=False)[0]


def measure(way: Way) -> dict[str, float]:
    """Seconds, FLOPs, peak memory and planned memory of a step, in this process."""
    device, is_gpu = torch.device(way.device), way.device == "cuda"
    with model_of({**QWEN3, **SHAPES[way.shape]}) as model:
        expected = planned(way.policy(), model)
        trainer = make_trainer(model, way.policy(), single_world(), device=device)
    if is_gpu:
        # What making the model took on the way is not of a step.
        torch.cuda.reset_peak_memory_stats()
    took = []
    for number in range(way.steps + 2):
        lengths = way.lengths(number)
        payloads = documents(lengths, model.config.vocab_size)
        # A step ends by waiting for the device: for the norm, and for the optimizer, whose time it takes.
        start = time.perf_counter()
        train_step(trainer, payloads)
        seconds, units = time.perf_counter() - start, [units_of(payload) for payload in payloads]
        took.append((seconds, trainer.flops([each.total for each in units], sum(each.decisions for each in units))))
    # The first two compile and set memory aside.
    seconds, work = sorted(took[2:])[way.steps // 2]
    return {
        "seconds": seconds,
        "flops": work,
        "tokens": sum(way.lengths(0)),
        "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else 0,
        "planned_bytes": sum(expected.device.values()),
    }


def in_a_process(way: Way, timeout_s: float | None = None) -> dict[str, float] | str:
    """What `measure` gives, or the last line of what failed."""
    command = [sys.executable, __file__, "--measure", json.dumps(attrs.asdict(way))]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"not done within {timeout_s:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"no message, exit code {done.returncode}"])[-1]
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """Run every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="0.6B,8B")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--document", type=int, default=2048)
    parser.add_argument("--ragged", action="store_true", help="draw the lengths of documents")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(Way(**json.loads(options.measure)))))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device, and torch sees none: nothing measured")
        return
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    peak = peak_of(torch.device(options.device))
    table = Table(title=f"{device}: a step of {options.tokens} tokens, documents of {options.document}")
    for column in ("shape", "compile", "float8"):
        table.add_column(column)
    for column in ("tokens/s", "MFU", "peak GB", "planned GB", "times the first"):
        table.add_column(column, justify="right")
    given = {name: getattr(options, name) for name in ("device", "tokens", "document", "steps", "recompute")}
    for shape in options.shapes.split(","):
        first = 0.0
        for compiled, float8 in itertools.product(COMPILE, FLOAT8):
            way = Way(shape=shape, is_ragged=options.ragged, compile=compiled, float8=float8, **given)
            found = in_a_process(way)
            if isinstance(found, str):
                table.add_row(shape, compiled, float8, found)
                continue
            first = first or found["seconds"]
            used = "" if not peak else f"{found['flops'] / found['seconds'] / peak:.1%}"
            memory = [f"{found[name] / 1e9:.1f}" for name in ("peak_bytes", "planned_bytes")]
            speed = f"{found['tokens'] / found['seconds']:,.0f}"
            table.add_row(shape, compiled, float8, speed, used, *memory, f"{first / found['seconds']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
