"""One training step of a policy on one GPU: tokens/s and model FLOPs utilisation.

    python benchmarks/step.py [--shapes 0.6B,8B] [--steps 5] [--tokens 8192] [--document 2048] [--recompute none]

The trainer's own step (pack, forward, backward, clip, AdamW) on drawn weights of Qwen3's shapes, in bf16, each way in a
process of its own. Weights, gradients and moments in float32 take 16 bytes a parameter: of the 8B shape, a GPU of
141 GB holds 18 of the 36 layers, whose utilisation is that of all (125 GB by the plan, and 164 GB with 16,384 tokens).

`--device cpu --shapes tiny --tokens 512 --document 64` goes through all of it without a GPU, in float32.

Utilisation is (6 · N · tokens + 6 · V · D · decisions + attention) / seconds / peak. N: parameters of the layers'
matrices; V · D: those of the output layer, which only decisions pass through; attention: 6 · L · H · d · T² for a
document of T units under a causal mask (L layers of H heads of d), half of what the full square would take. What is
computed again is not counted. The peak is that of dense bf16 products, for float8 too.
Source: arXiv:2204.02311, appendix B.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cosmos_core.config.schema import Float8Config, ParallelConfig, PolicyConfig
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, tokens_payload
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import ModelContext
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
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
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
PEAKS: Final[Mapping[str, float]] = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 products a second, by a part of the device's name."""
COMPILE: Final = ("off", "on")
FLOAT8: Final = ("none", "tensorwise", "rowwise")


def documents(tokens: int, document: int, vocabulary: int) -> list[Payload]:
    """Sequences of `document` units each, the first quarter the prompt."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, vocabulary, document + 1) for _ in range(tokens // document)]
    return [tokens_payload(row[: document // 4], row[document // 4 :]) for row in rows]


def flops(trainer: Trainer, config: Any, tokens: int, document: int) -> float:
    """Of one step (see the module)."""
    layers = [child for name, child in trainer.module.named_modules() if ".layers." in name]
    matrices = sum(layer.weight.numel() for layer in layers if isinstance(layer, torch.nn.Linear))
    number = tokens // document
    decisions = number * (document + 1 - document // 4)
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    output = config.vocab_size * config.hidden_size * decisions
    return 6.0 * (matrices * number * document + output + width * number * document**2)


def measure(shape: str, way: Mapping[str, str], options: argparse.Namespace) -> dict[str, float]:
    """Seconds, FLOPs and peak memory of a step, in this process."""
    device = torch.device(options.device)
    tokens, document = options.tokens, options.document
    is_gpu = device.type == "cuda"
    policy = PolicyConfig(
        # Few CPUs have products of bf16.
        precision="bf16" if is_gpu else "fp32",
        micro_batch_units=tokens,
        parallel=ParallelConfig(compile=way["compile"], recompute=way["recompute"]),
        float8=Float8Config(scaling=way["float8"]),
    )
    with tempfile.TemporaryDirectory() as folder:
        context = ModelContext(path=None, config={**QWEN3, **SHAPES[shape]}, assets=Path(folder))
        model = HuggingFaceModel(HuggingFaceOptions(), context)
        trainer = make_trainer(model, policy, single_world(), device=device)
    payloads = documents(tokens, document, model.config.vocab_size)
    seconds = []
    for _ in range(options.steps + 2):
        # A step ends by waiting for the device: for the norm, and for the optimizer, whose time it takes.
        start = time.perf_counter()
        train_step(trainer, payloads)
        seconds.append(time.perf_counter() - start)
    return {
        # The first two compile and set memory aside.
        "seconds": median(seconds[2:]),
        "flops": flops(trainer, model.config, tokens, document),
        "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else 0,
    }


def in_a_process(shape: str, way: Mapping[str, str], options: argparse.Namespace) -> dict[str, float] | str:
    """What `measure` gives, or the last line of what failed."""
    given = [f"--{name}={getattr(options, name)}" for name in ("tokens", "document", "steps", "device")]
    command = [sys.executable, __file__, "--measure", json.dumps([shape, way]), *given]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def peak_of(device: str) -> float | None:
    """Dense bf16 products a second of a device; None if it is not listed."""
    return next((value for name, value in PEAKS.items() if name in device), None)


def main() -> None:
    """Run every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="0.6B,8B")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--document", type=int, default=2048)
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device, and torch sees none: nothing measured")
        return
    if options.measure:
        shape, way = json.loads(options.measure)
        print(json.dumps(measure(shape, way, options)))
        return
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    peak = peak_of(device)
    table = Table(title=f"{device}: a step of {options.tokens} tokens, documents of {options.document}")
    for column in ("shape", "compile", "float8"):
        table.add_column(column)
    for column in ("tokens/s", "MFU", "peak GB", "times the first"):
        table.add_column(column, justify="right")
    for shape in options.shapes.split(","):
        first = 0.0
        for compiled, float8 in itertools.product(COMPILE, FLOAT8):
            way = {"compile": compiled, "float8": float8, "recompute": options.recompute}
            found = in_a_process(shape, way, options)
            if isinstance(found, str):
                table.add_row(shape, compiled, float8, found, "", "", "")
                continue
            first = first or found["seconds"]
            used = "" if peak is None else f"{found['flops'] / found['seconds'] / peak:.1%}"
            speed, memory = options.tokens / found["seconds"], found["peak_bytes"] / 1e9
            table.add_row(
                shape, compiled, float8, f"{speed:,.0f}", used, f"{memory:.1f}", f"{first / found['seconds']:.2f}"
            )
    Console().print(table)


if __name__ == "__main__":
    main()
