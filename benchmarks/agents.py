"""The latency that recording adds to a call: an agent's call at the endpoint, against the bare engine.

    python benchmarks/agents.py [--calls 400] [--at-once 1 16 64]

Both complete the same prompts with 16 units on one embedded engine, in turn: requests to the engine from its own
process, and calls of `/v1/chat/completions` from a process of clients. Sessions have three calls each that go on from
each other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.protocols import EngineContext, EnvironmentCapabilities, ModelContext, Request, Sampling
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.rollout.episodes.messages import Ended
from cosmos_core.rollout.episodes.player import player_of, serving
from cosmos_core.types import Message, Prompt

UNITS: Final = 16
TURNS: Final = 3
CONFIG: Final[dict[str, Any]] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
TEMPLATE: Final = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Kept:
    """A pool whose agents are elsewhere: it keeps where each is to call, and how it ends."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def begin(self, begin: Any, answer: Any) -> int:
        """Keep an agent."""
        self.begun.append((begin, answer))
        return len(self.begun) - 1

    def forget(self, episode: int) -> None:
        """It is somewhere else."""


def question(index: int) -> str:
    """A prompt of some 30 units."""
    return f"What is {index} times {index + 7}, and why? Say it step by step, please."


@contextlib.contextmanager
def engine_of() -> Iterator[tuple[HuggingFaceModel, EmbeddedEngine]]:
    """A tiny model and its engine."""
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder)
        model = HuggingFaceModel(
            HuggingFaceOptions(chat_template=TEMPLATE), ModelContext(path=None, config=CONFIG, assets=assets)
        )
        model.prepare(
            map(question, range(99)), {"build": "byte-bpe", "vocab_size": 512, "split_digits": True, "corpus_rows": 99}
        )
        context = EngineContext(
            model=model,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_in_flight=64,
            context_length=1024,
            seed=0,
            dialogues=True,
        )
        engine = EmbeddedEngine(EmbeddedOptions(), context)
        engine.start()
        try:
            yield model, engine
        finally:
            engine.shutdown()


def bare(model: HuggingFaceModel, engine: EmbeddedEngine, calls: int, at_once: int) -> list[float]:
    """Seconds of each request to the engine, so many at once."""
    took: list[float] = []
    numbers = iter(range(calls))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(numbers, None)
            if index is None:
                return
            prompt = model.encode(Prompt(text=(Message(role="user", content=question(index)),)))
            began = time.perf_counter()
            sampling = Sampling(max_units=UNITS)
            (handle,) = engine.submit(
                [Request(request_id=f"bare-{index}", prompt=prompt, sampling=sampling, seed=index)]
            )
            handle.result()
            took.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return took


def recorded(model: HuggingFaceModel, engine: EmbeddedEngine, calls: int, at_once: int) -> list[float]:
    """Seconds of each call at the endpoint, so many at once."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    pool = Kept()
    agents = player_of(
        EnvironmentConfig(plugin="agent"),
        EnvironmentCapabilities(calls_model=True),
        name="model",
        model=model,
        engine=engine,
        pool=pool,
        version=lambda: 0,
        post=events.put,
    )

    def run() -> None:
        while (event := events.get()) is not None:
            event()

    thread = threading.Thread(target=run)
    with serving(agents):
        thread.start()
        done = threading.Event()
        prompt = Prompt(text="task")
        number = calls // TURNS
        request = Request(
            request_id="0", prompt=model.encode(prompt), sampling=Sampling(max_units=1000, num_samples=number), seed=0
        )
        events.put(lambda: agents.begin(request, prompt, longest=1000, done=lambda _: done.set()))
        while len(pool.begun) < number:
            time.sleep(0.01)
        urls = [begin.base_url for begin, _ in pool.begun]
        command = [sys.executable, __file__, "--client", "--at-once", str(at_once)]
        told = subprocess.run(command, input=json.dumps(urls), capture_output=True, text=True, check=True)
        for episode, (_, answer) in enumerate(pool.begun):
            answer(Ended(episode=episode, reward=None))
        done.wait(60)
        events.put(None)
        thread.join()
    took: list[float] = json.loads(told.stdout)
    return took


async def client(urls: Sequence[str], at_once: int) -> list[float]:
    """Call at each URL three times, so many at once; seconds of each call."""
    import aiohttp

    took: list[float] = []
    rest = iter(enumerate(urls))

    async def work(session: aiohttp.ClientSession) -> None:
        for index, url in rest:
            messages = [{"role": "user", "content": question(index)}]
            for _ in range(TURNS):
                began = time.perf_counter()
                body = {"model": "model", "messages": messages, "max_tokens": UNITS}
                async with session.post(f"{url}/chat/completions", json=body) as reply:
                    answer = await reply.json()
                took.append(time.perf_counter() - began)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(work(session) for _ in range(at_once)))
    return took


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=396)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(json.dumps(asyncio.run(client(json.load(sys.stdin), options.at_once[0]))))
        return
    table = Table(
        "at once", "bare p50", "bare p99", "recorded p50", "recorded p99", "added p50", "added p99", title="ms"
    )
    with engine_of() as (model, engine):
        bare(model, engine, 50, 8)
        for at_once in options.at_once:
            rounds: dict[str, list[float]] = {"bare": [], "recorded": []}
            for _ in range(3):
                rounds["bare"] += bare(model, engine, options.calls, at_once)
                rounds["recorded"] += recorded(model, engine, options.calls, at_once)
            figures = [1000 * float(np.quantile(rounds[name], q)) for name in rounds for q in (0.5, 0.99)]
            figures += [figures[2] - figures[0], figures[3] - figures[1]]
            table.add_row(str(at_once), *(f"{each:.1f}" for each in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
