"""One engine in a process of its own: rounds come as lines of JSON on stdin, what they took goes out on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
from serving.engines import ENGINES, Serve
from serving.work import Work, config_of, make_work


def measured(serve: Serve, work: Work, settle: Callable[[], None]) -> dict[str, float]:
    """Seconds of a round, of this process' CPU time and of the wall's, and what was done."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    done = serve(work)
    settle()
    cpu_s, wall_s = time.process_time() - begin_cpu, time.perf_counter() - begin
    if done.num_units != work.num_units:
        raise RuntimeError(f"{done.num_units} units were generated, {work.num_units} were asked for")
    return {"cpu_s": cpu_s, "wall_s": wall_s, "num_units": done.num_units, "prompt_units": done.prompt_units}


def main(name: str, model: str, dtype: str, device: str) -> None:
    """Start the engine, then serve until stdin ends."""
    # Answers go out where libraries that print cannot reach.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    serve = ENGINES[name](model, dtype, device)
    settle = torch.cuda.synchronize if device == "cuda" else int
    vocabulary = config_of(model).vocab_size
    print("ready", file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = measured(serve, make_work(asked["kind"], asked["round"], vocabulary), settle)
        print(json.dumps(answer), file=answers)
    answers.flush()
    # Engines' own threads must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
