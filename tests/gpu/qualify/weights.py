"""Stage D: weights from trainer to engine, and checkpoints, beside what a step takes."""

from __future__ import annotations

import time
from statistics import median

import torch
import weights as ways
from step import QWEN3, SHAPES, Way, documents, model_of

from cosmos_core.policy.checkpoints.checkpoint import Place, path_of
from cosmos_core.policy.checkpoints.reader import load_shares
from cosmos_core.policy.checkpoints.saver import CheckpointSaver
from cosmos_core.policy.processes.world import single_world
from cosmos_core.testing.layouts import make_trainer, train_step
from cosmos_core.testing.worlds import run_world
from cosmos_core.weights.shards import local_shards
from tests.gpu.qualify.where import Where

STEP = 1 << 18
"""Tokens of a step that a checkpoint's stall is part of."""


def publish(where: Where, name: str, *, megabytes: int, way: str) -> None:
    """From two policy ranks to two rollout ranks on the same device, digests of both sides included.

    Args:
        where: It runs.
        name: Of the check.
        megabytes: Of weights, in bf16.
        way: Of `weights.WAYS`.
    """
    megabytes = 20 if where.is_tiny else megabytes
    ranks = len(ways.POLICY) + len(ways.ROLLOUT)
    asked = megabytes, 3, str(where.folder), [way], where.device
    # What is loaded is refused there unless its digest is the one that was published.
    found = [each[way] for each in run_world(ranks, ways.run, *asked, timeout_s=300)]

    def most(part: str, chosen: tuple[int, ...]) -> float:
        return median(max(getattr(found[rank][turn], part) for rank in chosen) for turn in range(3))

    update_s = most("update_s", ways.ROLLOUT)
    where.speed(f"{name}: published to loaded, attested", megabytes / 1000 / update_s, "GB/s", least=20)
    where.speed(f"{name}: rollouts paused", 1000 * most("still_s", ways.ROLLOUT), "ms")
    where.speed(f"{name}: training stands still", 1000 * most("still_s", ways.POLICY), "ms")


def checkpoint(where: Where, name: str, *, shape: str) -> None:
    """A checkpoint beside training: its stall, its time, and the load, which has to give back every bit."""
    way = Way(shape="tiny", device="cpu", tokens=512, document=64) if where.is_tiny else Way(shape=shape, compile="on")
    with model_of({**QWEN3, **SHAPES[way.shape]}) as model:
        trainer = make_trainer(model, way.policy(), single_world(), device=torch.device(where.device))
    payloads = documents(way.lengths(0), model.config.vocab_size)
    took = []
    for _ in range(4):
        start = time.perf_counter()
        train_step(trainer, payloads)
        took.append(time.perf_counter() - start)
    state = trainer.state()
    gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
    saver = CheckpointSaver(str(where.folder), 2, lambda *_: None)
    stalls = []
    for step in (1, 2):
        start = time.perf_counter()
        saver.save(state, Place(run_id="qualify", step=step, stage=0, nonfinite_steps=0))
        stalls.append(time.perf_counter() - start)
        saver.wait()
    whole_s = time.perf_counter() - start
    step_s = min(took[2:]) * STEP / way.tokens
    note = f"{1000 * stalls[1]:.0f} ms of {step_s:.2f} s for {STEP:,} tokens"
    where.speed(f"{name}: stall of a step", 100 * stalls[1] / step_s, "%", most=5, note=note)
    where.speed(f"{name}: saved", gigabytes / whole_s, "GB/s", note=f"{gigabytes:.1f} GB")
    before = {key: tensor.clone() for key, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    start = time.perf_counter()
    load_shares(path_of(str(where.folder), 2), local_shards(state))
    where.speed(f"{name}: loaded", gigabytes / (time.perf_counter() - start), "GB/s")
    wrong = sum(not torch.equal(before[key], tensor) for key, tensor in state.items())
    where.right(f"{name}: tensors that came back otherwise", wrong, f"of {len(state)}", most=0)
