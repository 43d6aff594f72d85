"""Dialogues with and without the embedded engine's prefix cache: prompt units processed, and time.

    python benchmarks/dialogues.py

16 dialogues at once of 8 turns, which end together: a prompt of 64 units, turns of 16, observations of 32; a model of
2 layers of 256. One engine after the other, in turns; each round has dialogues of its own.
"""

from __future__ import annotations

import time
from statistics import median
from typing import cast

import numpy as np
import torch
from serving.work import CONTEXT, DTYPES, SEATS, RandomModel

from cosmos_core.models.tokens import tokens_payload
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, Request, RolloutEngine, Sampling

DIALOGUES, TURNS, PROMPT, TURN, OBSERVATION, ROUNDS = 16, 8, 64, 16, 32, 3


def started(dtype: str, share: float) -> RolloutEngine:
    """An engine that keeps so much."""
    context = EngineContext(
        model=RandomModel("tiny"),  # type: ignore[arg-type] - it has what engines use
        dtype=DTYPES[dtype],
        device=torch.device("cpu"),
        max_in_flight=SEATS,
        context_length=CONTEXT,
        seed=0,
        dialogues=True,
    )
    options = {"verify": False, "prefix_cache": share}
    made = PluginSet.load([("engine", "embedded")]).create("engine", "embedded", options, context)
    engine = cast("RolloutEngine", made)
    engine.start()
    return engine


def play(engine: RolloutEngine, number: int) -> tuple[int, float, float]:
    """Prompt units processed, and seconds of a round: by the clock, and of the CPU."""
    ids = np.random.default_rng(number)
    before, begin, cpu_begin = engine.stats().prompt_units, time.perf_counter(), time.process_time()
    said = ids.integers(1, 8192, (DIALOGUES, PROMPT)).tolist()
    for turn in range(TURNS):
        requests = [
            Request(
                request_id=f"{place}/{turn}",
                prompt=tokens_payload(so_far),
                sampling=Sampling(max_units=TURN),
                seed=place + turn * DIALOGUES,
            )
            for place, so_far in enumerate(said)
        ]
        for so_far, handle in zip(said, engine.submit(requests), strict=True):
            (made,) = handle.result()
            so_far.extend(np.frombuffer(made.payload.arrays["completion"].data, np.int32).tolist())
            so_far.extend(ids.integers(1, 8192, OBSERVATION).tolist())
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    return engine.stats().prompt_units - before, wall_s, cpu_s


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("Without / with, and the ratio; medians of 3 rounds.\n")
    print("| dtype | prompt units | seconds | CPU seconds |")
    print("|---|---|---|---|")
    for dtype in DTYPES:
        engines = [started(dtype, share) for share in (0.0, 0.5)]
        for engine in engines:
            play(engine, ROUNDS)
        rounds = [[play(engine, number) for engine in engines] for number in range(ROUNDS)]
        cells = [dtype]
        for measured in range(3):
            without, kept = (median(each[index][measured] for each in rounds) for index in range(2))
            cells.append(f"{without:,.5g} / {kept:,.5g}: {kept / without:.2f}")
        print(f"| {' | '.join(cells)} |")
        for engine in engines:
            engine.shutdown()


if __name__ == "__main__":
    main()
