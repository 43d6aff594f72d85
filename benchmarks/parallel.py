"""Layouts of the policy on this machine's CPU: memory of each process, speed, loading, packing.

    python benchmarks/parallel.py [--steps 2] [--only layouts,loading,packing]

A Qwen3 of 33.6 M parameters in float32, one thread a process, gloo. Each layout trains the same batch: 16 sequences of
64 units in micro-batches of 256. With more processes than cores, and processes that share cores with others,
tokens/s say little; tokens per CPU second, over all processes, tell what a layout computes besides.

Memory is private memory that is written (resident without files), sampled every 2 ms while the model is built and does
a step, above what the process held before; `held` is what its parameters, gradients and moments take, and `plan` is
what `cosmos plan` says of both. The C library is told to give back what is freed, which it would keep for a while: so a
peak is of what is held at once, as an accelerator's allocator counts it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import numpy as np
import torch
from memory import Memory
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import Recipe
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, tokens_payload
from cosmos_core.models.head import evaluate, vocabulary_of
from cosmos_core.models.tokens import values
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import MicroBatch, ModelContext
from cosmos_core.run.planning.memory import policy_memory
from cosmos_core.testing.layouts import make_trainer, train_step
from cosmos_core.testing.worlds import run_world
from cosmos_core.types import Payload

CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SEQUENCES, LENGTH, UNITS = 16, 64, 256
MB: Final = 1e6
PATIENCE_S: Final = 600.0

LAYOUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "one process": {},
    "one process, recompute selective": {"parallel": {"recompute": "selective"}},
    "one process, recompute full": {"parallel": {"recompute": "full"}},
    "fsdp 2": {"mesh": {"dp_shard": 2}},
    "tp 2": {"mesh": {"tp": 2}},
    "tp 2, no sequence parallel": {"mesh": {"tp": 2}, "parallel": {"sequence_parallel": False}},
    "cp 2, ulysses": {"mesh": {"cp": 2}, "parallel": {"context": "ulysses"}},
    "cp 2, gather": {"mesh": {"cp": 2}, "parallel": {"context": "gather"}},
    "cp 2, ring": {"mesh": {"cp": 2}, "parallel": {"context": "ring"}},
    "pp 2, 1f1b": {"mesh": {"pp": 2}},
    "pp 2, 1f1b, weights freed": {"mesh": {"pp": 2}, "parallel": {"reshard_after_forward": "always"}},
    "pp 2, interleaved": {"mesh": {"pp": 2}, "parallel": {"schedule": "interleaved"}},
    "pp 2, zero-bubble": {"mesh": {"pp": 2}, "parallel": {"schedule": "zero-bubble"}},
    "fsdp 2 · tp 2": {"mesh": {"dp_shard": 2, "tp": 2}},
}


@attrs.frozen(kw_only=True)
class Measured:
    """One process of a layout: bytes it holds, bytes at its peak, and seconds of wall and of CPU of each step."""

    held: int
    peak: int
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]


def recipe_with(policy: Mapping[str, Any]) -> Recipe:
    """A recipe of which only the policy matters."""
    return recipe_from(
        {
            "run": {"name": "bench", "steps": 1},
            "model": {"plugin": "hf", "path": "none"},
            "algorithm": {"plugin": "sft"},
            "dataset": {"plugin": "jsonl"},
            "policy": {"optimizer": {"lr": 1e-6}, "micro_batch_units": UNITS, "precision": "fp32", **policy},
        }
    )


def model_of(assets: Path, path: str | None = None) -> HuggingFaceModel:
    """The model, its weights drawn or those of a checkpoint."""
    context = ModelContext(path=path, config=None if path else CONFIG, assets=assets)
    return HuggingFaceModel(HuggingFaceOptions(), context)


def payload(length: int, seed: int) -> Payload:
    """A sequence of which a quarter is the prompt; it takes `length` places of a row."""
    tokens = np.random.default_rng(seed).integers(3, CONFIG["vocab_size"], length + 1)
    return tokens_payload(tokens[: length // 4], tokens[length // 4 :])


def train(assets: Path, policy: Mapping[str, Any], steps: int) -> Measured:
    """A process of a layout: one step to warm up, then `steps`."""
    torch.set_num_threads(1)
    config = recipe_with(policy).policy
    payloads = [payload(LENGTH, seed) for seed in range(SEQUENCES)]
    memory, wall_s, cpu_s = Memory(), [], []
    return_freed_blocks(of_bytes=1 << 16)
    with memory.watched(trimmed=False):
        trainer = make_trainer(model_of(assets), config, World(form_mesh(config.mesh, "cpu")))
        train_step(trainer, payloads)
    return_freed_blocks(of_bytes=1 << 25)
    for _ in range(steps + 1):
        start = time.perf_counter(), time.process_time()
        train_step(trainer, payloads)
        wall_s.append(time.perf_counter() - start[0])
        cpu_s.append(time.process_time() - start[1])
    parameters = list(trainer.module.parameters())
    tensors = [*parameters, *(each.grad for each in parameters), *trainer.optimizer.state().values()]
    held = sum(local(tensor).nbytes for tensor in tensors if tensor is not None)
    return Measured(held=held, peak=memory.peak, wall_s=tuple(wall_s[1:]), cpu_s=tuple(cpu_s[1:]))


def return_freed_blocks(*, of_bytes: int) -> None:
    """Have the C library give back what is freed, from this size on: slower, and a peak is then of what is held."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        mmap_threshold = -3
        library.mallopt(mmap_threshold, of_bytes)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layouts(console: Console, assets: Path, steps: int) -> None:
    """Memory and speed of each layout, beside what the plan says."""
    names = ("layout", "tokens/s", "tokens/CPU s", "held MB", "plan", "peak MB", "plan", "peak / plan")
    table = table_of(f"Layouts: {SEQUENCES * LENGTH} units a step, median of {steps} steps, largest process", names)
    facts = model_of(assets).facts()
    for name, policy in LAYOUTS.items():
        recipe = recipe_with(policy)
        sizes = policy.get("mesh", {})
        found: list[Measured] = run_world(
            int(np.prod(list(sizes.values()))), train, assets, policy, steps, timeout_s=PATIENCE_S
        )
        planned = policy_memory(recipe, facts)
        held = max(sum(rank.device[part] for part in ("parameters", "gradients", "optimizer")) for rank in planned)
        whole = max(sum(rank.device.values()) for rank in planned)
        peak = max(each.peak for each in found)
        units = SEQUENCES * LENGTH
        speed = units / median(max(each) for each in zip(*(one.wall_s for one in found), strict=True))
        work = units / median(sum(each) for each in zip(*(one.cpu_s for one in found), strict=True))
        numbers = (max(each.held for each in found), held, peak, whole)
        table.add_row(
            name, f"{speed:,.0f}", f"{work:,.0f}", *(f"{n / MB:,.0f}" for n in numbers), f"{peak / whole:.2f}"
        )
    console.print(table)


def load_streamed(assets: Path, checkpoint: str, policy: Mapping[str, Any]) -> tuple[int, float]:
    """This process's part of a checkpoint, streamed: peak bytes and seconds."""
    config = recipe_with(policy).policy
    model = model_of(assets, checkpoint)
    layout = layout_of(config, form_mesh(config.mesh, "cpu"), "cpu")
    memory, start = Memory(), time.perf_counter()
    with memory.watched(trimmed=False):
        model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"), layout=layout)
    return memory.peak, time.perf_counter() - start


def load_whole(checkpoint: str) -> tuple[int, float]:
    """All of a checkpoint, by transformers: peak bytes and seconds."""
    memory, start = Memory(), time.perf_counter()
    with memory.watched(trimmed=False):
        module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        for parameter in module.parameters():
            # Weights of a float32 file are mapped until they are written, as the first step does.
            parameter.data.mul_(1.0)
    return memory.peak, time.perf_counter() - start


def loading(console: Console, assets: Path, steps: int) -> None:
    """A checkpoint in bfloat16, loaded into float32 weights."""
    table = table_of("Loading, largest process", ("way", "processes", "peak MB", "seconds", "peak / from_pretrained"))
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(assets)
        module = model.build(seed=0, dtype=torch.bfloat16, device=torch.device("cpu"))
        model.export(module, Path(folder))
        whole = [run_world(1, load_whole, folder, timeout_s=PATIENCE_S)[0] for _ in range(steps + 1)]
        peak, seconds = max(p for p, _ in whole), median(s for _, s in whole)
        table.add_row("from_pretrained", "1", f"{peak / MB:,.0f}", f"{seconds:.2f}", "1.00")
        for name in ("fsdp 2", "tp 2", "pp 2, 1f1b", "fsdp 2 · tp 2"):
            policy = LAYOUTS[name]
            size = int(np.prod(list(policy["mesh"].values())))
            found = [
                run_world(size, load_streamed, assets, folder, policy, timeout_s=PATIENCE_S) for _ in range(steps + 1)
            ]
            most = max(p for one in found for p, _ in one)
            took = median(max(s for _, s in one) for one in found)
            table.add_row(f"streamed, {name}", str(size), f"{most / MB:,.0f}", f"{took:.2f}", f"{most / peak:.2f}")
    console.print(table)


def padded(batch: MicroBatch, payloads: Sequence[Payload], module: torch.nn.Module) -> torch.Tensor:
    """Log-probabilities of a micro-batch, as transformers computes them: a row for each sequence, padded."""
    rows = [payloads[index] for index in batch.sequences]
    prompts = [len(values(row, "prompt")) for row in rows]
    tokens = [torch.from_numpy(np.concatenate((values(row, "prompt"), values(row, "completion")))) for row in rows]
    tokens_ST = torch.nn.utils.rnn.pad_sequence([row[:-1] for row in tokens], batch_first=True)
    mask_ST = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row) - 1) for row in tokens], batch_first=True)
    hidden_STD = module.base_model(input_ids=tokens_ST, attention_mask=mask_ST.long(), use_cache=False)[0]
    pairs = zip(hidden_STD, tokens, prompts, strict=True)
    hidden_ND = torch.cat([row[start - 1 : len(ids) - 1] for row, ids, start in pairs])
    targets_N = torch.cat([ids[start:] for ids, start in zip(tokens, prompts, strict=True)])
    decided = evaluate(
        module.get_output_embeddings(), hidden_ND, targets_N,
        vocabulary=vocabulary_of(module), temperature=1.0, with_entropy=False,
    )  # fmt: skip
    return decided.logprobs_N


def by_padded_size(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Sequences in the order given, as many in a micro-batch as fit when padded to the longest."""
    batches: list[list[int]] = [[]]
    for index, length in enumerate(lengths):
        longest = max([length, *(lengths[each] for each in batches[-1])])
        if longest * (len(batches[-1]) + 1) > budget and batches[-1]:
            batches.append([])
        batches[-1].append(index)
    return [tuple(batch) for batch in batches]


def packing(console: Console, assets: Path, steps: int) -> None:
    """One row of documents against padded rows, in turn."""
    lengths = [int(x) for x in np.random.default_rng(0).lognormal(4.2, 0.8, 48).clip(8, 500)]
    payloads = [payload(length, seed) for seed, length in enumerate(lengths)]
    model = model_of(assets)
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    plain = AutoModelForCausalLM.from_config(module.config, attn_implementation="sdpa").eval()
    plain.load_state_dict(module.state_dict())
    ascending = sorted(range(len(lengths)), key=lambda index: lengths[index])
    budget = 2 * UNITS

    def run_packed() -> float:
        batches = model.pack(payloads, budget=budget)
        return sum(gradient(model.decide(module, each, temperature=1.0).logprobs_N) for each in batches)

    def run_padded(order: Sequence[int]) -> float:
        total = 0.0
        for members in by_padded_size([lengths[index] for index in order], budget):
            batch = MicroBatch(
                sequences=tuple(order[index] for index in members), num_decisions=(), num_units=0, inputs={}
            )
            total += gradient(padded(batch, payloads, plain))
        return total

    ways = {
        "padded, as they come": lambda: run_padded(range(len(lengths))),
        "padded, sorted by length": lambda: run_padded(ascending),
        "packed": run_packed,
    }
    totals: dict[str, list[float]] = {name: [] for name in ways}
    sums: dict[str, float] = {}
    for _ in range(steps + 1):
        for name, way in ways.items():
            start = time.process_time()
            sums[name] = way()
            totals[name].append(time.process_time() - start)
    assert max(sums.values()) - min(sums.values()) < 1e-4 * abs(sums["packed"]), sums
    spread = f"{min(lengths)} to {max(lengths)} units, mean {np.mean(lengths):.0f}"
    title = f"Forward and backward of ragged sequences, {spread}"
    table = table_of(title, ("way", "tokens/CPU s", "times padded"))
    for name, seconds in totals.items():
        ratio = median(totals["padded, as they come"]) / median(seconds)
        table.add_row(name, f"{sum(lengths) / median(seconds):,.0f}", f"{ratio:.2f}")
    console.print(table)


def gradient(logprobs_N: torch.Tensor) -> float:
    """Run the backward pass; the sum of the log-probabilities."""
    total = logprobs_N.sum()
    total.backward()
    return float(total.detach())


def table_of(title: str, columns: Sequence[str]) -> Table:
    """A table whose first column holds names."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


PARTS: Final = {"layouts": layouts, "loading": loading, "packing": packing}


def main() -> None:
    """Run what is asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder)
        model_of(assets).prepare(["some text"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
        for name in options.only.split(","):
            PARTS[name](Console(width=140), assets, options.steps)


if __name__ == "__main__":
    main()
