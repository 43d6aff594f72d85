"""Stage D: weights from trainer to engine, and checkpoints, beside what a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.shards import canonical_tensors, local_shards
from tests.gpu.qualify.where import Where

STEP = 1 << 18
"""Tokens of a step that a checkpoint's or a publication's stall is part of."""
TURNS = 3
"""Steps of each kind; the first save and the first publication register memory, and are told apart."""
LEAST_GB_S = 20


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
    where.speed(f"{name}: published to loaded, attested", megabytes / 1000 / update_s, "GB/s", least=LEAST_GB_S)
    # Half of what all of it may take.
    allowed_ms = megabytes / 2 / LEAST_GB_S
    where.speed(f"{name}: rollouts paused", 1000 * most("still_s", ways.ROLLOUT), "ms", most=allowed_ms)


def checkpoint(where: Where, name: str, *, shape: str) -> None:
    """Checkpoints and publications beside training: what each adds to a step; and a load, which has to be exact."""
    way = Way(shape="tiny", device="cpu", tokens=512, document=64) if where.is_tiny else Way(shape=shape, compile="on")
    with model_of({**QWEN3, **SHAPES[way.shape]}) as model:
        trainer = make_trainer(model, way.policy(), single_world(), device=torch.device(where.device))
    payloads = documents(way.lengths(0), model.config.vocab_size)

    def took(before: Callable[[int], Callable[[], object]] = lambda _: lambda: None) -> list[float]:
        """Seconds of steps, with what comes before each; what that returns comes after it, and is not counted."""
        found = []
        for number in range(TURNS):
            start = time.perf_counter()
            after = before(number)
            # It ends by waiting for the device, and so for copies that the optimizer has to wait for.
            train_step(trainer, payloads)
            found.append(time.perf_counter() - start)
            after()
        return found

    state, saver = trainer.state(), CheckpointSaver(str(where.folder), 2, lambda *_: None)

    def save(number: int) -> Callable[[], object]:
        saver.save(state, Place(run_id="qualify", step=number, stage=0, nonfinite_steps=0))
        return saver.wait

    took()
    alone_s = median(took())
    scale = STEP / way.tokens

    def judge(what: str, seconds: Sequence[float]) -> None:
        stall_s = max(0.0, median(seconds[1:]) - alone_s)
        first_s = max(0.0, seconds[0] - alone_s)
        note = f"{1000 * stall_s:.0f} ms of {scale * alone_s:.2f} s for {STEP:,} tokens; the first one {first_s:.2f} s"
        where.speed(f"{name}: {what} adds to a step", 100 * stall_s / (scale * alone_s), "%", most=5, note=note)

    judge("a save", took(save))
    with WeightPublisher("qualify") as publisher:

        def publish(number: int) -> Callable[[], object]:
            snapshot = publisher.stage(number, canonical_tensors(trainer.module), torch.bfloat16)

            def seal() -> None:
                publisher.seal(snapshot)
                publisher.retain(number + 1)

            return seal

        judge("a publication", took(publish))
    gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
    start = time.perf_counter()
    save(TURNS)()
    where.speed(f"{name}: saved", gigabytes / (time.perf_counter() - start), "GB/s", note=f"{gigabytes:.1f} GB")
    before = {key: tensor.clone() for key, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    start = time.perf_counter()
    load_shares(path_of(str(where.folder), TURNS), local_shards(state))
    where.speed(f"{name}: loaded", gigabytes / (time.perf_counter() - start), "GB/s")
    wrong = sum(not torch.equal(before[key], tensor) for key, tensor in state.items())
    where.right(f"{name}: tensors that came back otherwise", wrong, f"of {len(state)}", most=0)
