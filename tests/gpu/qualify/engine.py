"""Stage C: the embedded engine: units a second by sequences in flight, and its log-probs against the trainer's."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from serving.process import EngineProcess
from serving.work import FLAT
from step import QWEN3, SHAPES, model_of

from cosmos_core.models.tokens import token_array
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, Generated, Model, Request, Sampling
from cosmos_core.testing.conformance.model.subject import by_payload
from cosmos_core.types import Payload
from tests.gpu.qualify.where import Where
from tests.gpu.sleeping import IN_FLIGHT, UNITS, sleeping

ROUNDS = 2


def speed(where: Where, name: str, *, model: str, engine: str, sequences: Sequence[int], vllm: float) -> None:
    """Units a second.

    Args:
        where: It runs.
        name: Of the check.
        model: Of `serving.work.MODELS`.
        engine: Of `serving.engines.ENGINES`.
        sequences: Numbers of them in flight.
        vllm: Least part of vLLM's speed, where it is installed.
    """
    if "compiled" in engine and "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        where.skipped(name, f"torch {torch.__version__} has no isolate_recompiles, which compiling it takes")
        return
    if "without graphs" in engine and where.device == "cpu":
        where.skipped(name, "a CPU has no CUDA graphs to do without")
        return
    has_vllm = importlib.util.find_spec("vllm") is not None and where.device == "cuda"
    dtype = "bf16" if where.device == "cuda" else "fp32"
    if where.is_tiny:
        model, sequences = "tiny" if model == "0.6B" else "small", [min(number, 8) for number in sequences[:2]]
    with contextlib.ExitStack() as stack:
        engines = {
            each: stack.enter_context(EngineProcess(sys.executable, each, model, dtype, where.device, timeout_s=300))
            for each in (engine, *(["vllm"] if has_vllm else []))
        }
        for number in sequences:
            speeds = {each: _units_a_second(process, f"{FLAT}{number}") for each, process in engines.items()}
            told = f"{name}: {number} sequences" if number > 1 else f"{name}: 1 sequence"
            where.speed(told, speeds[engine], "units/s")
            if has_vllm:
                note = f"vLLM: {speeds['vllm']:,.0f} units/s"
                where.speed(f"{told}, part of vLLM's speed", speeds[engine] / speeds["vllm"], least=vllm, note=note)
    if not has_vllm:
        where.skipped(f"{name}: part of vLLM's speed", "vllm is not installed")


def _units_a_second(process: EngineProcess, kind: str) -> float:
    # The first warms up.
    served = [process.serve(kind, number) for number in range(ROUNDS + 1)][1:]
    return max(each["num_units"] / each["wall_s"] for each in served)


def divergence(where: Where, name: str, *, model: str) -> None:
    """How far the log-probs of what the engine draws are from those that the trainer gives the same weights."""
    device, is_gpu = torch.device(where.device), where.device == "cuda"
    # Drawn wider than usual: logits as far apart as a trained model's.
    config = {**QWEN3, **SHAPES[where.shape(model)], "initializer_range": 0.06}
    number, units = (4, 16) if where.is_tiny else (64, 128)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    with model_of(config) as made:
        found = _generated(made, dtype, device, number=number, units=units)
        module = made.build(seed=0, dtype=dtype, device=device).float()
        payloads = [each.payload for each in found]
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=is_gpu):
            batches = made.pack(payloads, budget=8192)
            decided = [made.decide(module, each, temperature=1.0).logprobs_N.float().cpu() for each in batches]
    trained = by_payload(len(payloads), batches, decided)
    drawn = [np.frombuffer(each.arrays["logprobs"].data, np.float32) for each in payloads]
    ratio_N = (torch.cat(trained) - torch.from_numpy(np.concatenate(drawn).copy())).double()
    note = f"{len(ratio_N)} units, furthest off {ratio_N.abs().max():.3g}"
    where.right(f"{name}: KL", float((ratio_N.exp() - 1 - ratio_N).mean()), "nats", most=1e-3, note=note)


def sleep(where: Where, name: str, *, model: str, engine: str, compiles: bool = False) -> None:
    """Whether an engine computes the same after it has slept, and how much of the GPU is free meanwhile."""
    options: dict[str, Any] = {}
    if engine == "vllm":
        is_cpu = where.device == "cpu"
        if is_cpu or importlib.util.find_spec("vllm") is None:
            where.skipped(name, "vLLM gives up the memory of GPUs only" if is_cpu else "vllm is not installed")
            return
        options = {"compile": compiles, "memory_share": 0.4}
    found = sleeping(engine, where.device, options, {**QWEN3, **SHAPES[where.shape(model)]})
    where.right(f"{name}: digests that differ", 0 if found["attested"] else 1, most=0)
    where.right(f"{name}: log-probs, furthest off", found["furthest"], "nats", most=0.02)
    lost = IN_FLIGHT * UNITS - sum(found["units"])
    where.right(f"{name}: units in flight that are lost", lost, most=0)
    if where.device == "cuda":
        where.speed(f"{name}: freed, times the weights", found["freed_bytes"] / found["weights_bytes"], least=1.0)


def _generated(
    model: Model, dtype: torch.dtype, device: torch.device, *, number: int, units: int
) -> Sequence[Generated]:
    context = EngineContext(
        model=model, dtype=dtype, device=device, max_in_flight=number, context_length=64 + units, seed=0
    )
    engine = PluginSet.load([("engine", "embedded")]).create("engine", "embedded", {}, context)
    engine.start()
    try:
        draw = np.random.default_rng(0)
        requests = [
            Request(
                request_id=str(index),
                prompt=Payload(kind="tokens", arrays={"prompt": token_array(draw.integers(3, 300, 8 + index % 32))}),
                sampling=Sampling(max_units=units),
                seed=index,
            )
            for index in range(number)
        ]
        return [generated for handle in engine.submit(requests) for generated in handle.result()]
    finally:
        engine.shutdown()
