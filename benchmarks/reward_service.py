"""Completions a second of a reward service, beside the same scorer inline and in a worker.

    python benchmarks/reward_service.py [--seconds 3] [--clients 1 8 64] [--out benchmarks/results/FILE.md]

The scorer is `colour`, which is quick, so what is measured is the way there and back. inline: `score` is called in
this process. worker: a pool of one worker process, as in a rollout replica, which has `clients` completions at a time.
service: a real `cosmos reward-service` with one worker; each client enqueues a video, waits for its results in long
polls, and goes on. Latency is from the beginning of a completion to its score. The three go in turns, round after
round; the medians of the rounds are told. MB/s counts frames.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import attrs
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from cosmos_core.config.schema import RewardConfig
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import RewardContext
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.testing.conformance.reward import shown_as

SHAPES = {
    "image 64 x 64": (1, 64, 64, 3),
    "video 9 x 64 x 64": (9, 64, 64, 3),
    "video 16 x 128 x 128": (16, 128, 128, 3),
}


@attrs.frozen
class Measured:
    """Latencies of completions that were scored in so many seconds."""

    seconds: float
    latencies_s: list[float]

    @property
    def a_second(self) -> float:
        """Completions a second."""
        return len(self.latencies_s) / self.seconds


def inline(frames: npt.NDArray[np.uint8], _: int, seconds: float) -> Measured:
    """`score` in this process."""
    reward = PluginSet.load([("reward", "colour")]).create("reward", "colour", {}, RewardContext(name="colour", seed=0))
    completion, latencies = shown_as(frames), []
    begin = time.perf_counter()
    while (start := time.perf_counter()) - begin < seconds:
        reward.score(completion)
        latencies.append(time.perf_counter() - start)
    return Measured(time.perf_counter() - begin, latencies)


def worker(frames: npt.NDArray[np.uint8], clients: int, seconds: float) -> Measured:
    """A pool of one worker, which has `clients` completions at a time."""
    completion, latencies = shown_as(frames), []
    answers: queue.SimpleQueue[float] = queue.SimpleQueue()
    with contextlib.closing(RewardPool([RewardConfig(plugin="colour")], num_workers=1, seed=0)) as pool:

        def submit() -> None:
            start = time.perf_counter()
            pool.submit([completion], lambda _: answers.put(start))

        pool.start()
        submit()
        answers.get()
        begin = time.perf_counter()
        for _ in range(clients):
            submit()
        while time.perf_counter() - begin < seconds:
            start = answers.get()
            latencies.append(time.perf_counter() - start)
            submit()
        return Measured(time.perf_counter() - begin, latencies)


@contextlib.contextmanager
def served() -> Iterator[tuple[str, str]]:
    """A service, by its address and token."""
    token = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rewards.toml"
        path.write_text('port = 0\n[[scorer]]\nplugin = "colour"\n')
        command = [sys.executable, "-P", "-m", "cosmos_core.cli", "reward-service", "--config", str(path)]
        environment = {**os.environ, "WFM_REWARD_TOKEN": token}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            found = re.search(r"http://[\d.:]+\d", process.stdout.readline())
            assert found is not None
            try:
                yield found[0], token
            finally:
                process.send_signal(signal.SIGINT)
                process.wait()


def service(frames: npt.NDArray[np.uint8], clients: int, seconds: float) -> Measured:
    """A real service and `clients` clients."""
    file = io.BytesIO()
    np.save(file, frames[None])
    line = {"version": 1, "kind": "media", "scorers": ["colour"], "completions": [{"prompt": "red", "fps": 8.0}]}
    body = json.dumps(line).encode() + b"\n" + file.getvalue()

    async def client(session: aiohttp.ClientSession, url: str, until: float, latencies: list[float]) -> None:
        while (start := time.perf_counter()) < until:
            async with session.post(f"{url}/v1/enqueue", data=body) as answer:
                ticket = (await answer.json())["id"]
            said: dict[str, Any] = {"status": "pending"}
            while said["status"] == "pending":
                async with session.get(f"{url}/v1/fetch", params={"id": ticket, "wait_s": "30"}) as answer:
                    said = await answer.json()
            if "value" not in said["scores"]["colour"][0]:
                raise SystemExit(f"no score: {said}")
            latencies.append(time.perf_counter() - start)

    async def all_of_them(url: str, token: str) -> Measured:
        latencies: list[float] = []
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
            await client(session, url, time.perf_counter() + 0.2, [])
            begin = time.perf_counter()
            working: list[Awaitable[None]] = [client(session, url, begin + seconds, latencies) for _ in range(clients)]
            await asyncio.gather(*working)
            return Measured(time.perf_counter() - begin, latencies)

    with served() as (url, token):
        return asyncio.run(all_of_them(url, token))


WAYS: dict[str, Callable[[npt.NDArray[np.uint8], int, float], Measured]] = {
    "inline": inline,
    "worker": worker,
    "service": service,
}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    table = Table("completion", "way", "at a time", "a second", "MB/s", "median ms", "95 % ms")
    rows = []
    for name, shape in SHAPES.items():
        frames = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        cases = [("inline", 1), *((way, clients) for clients in chosen.clients for way in ("worker", "service"))]
        found: dict[tuple[str, int], list[Measured]] = {case: [] for case in cases}
        for _ in range(chosen.rounds):
            for way, clients in cases:
                found[way, clients].append(WAYS[way](frames, clients, chosen.seconds))
        for (way, clients), measured in found.items():
            rate = median(each.a_second for each in measured)
            middle, late = (
                median(float(np.percentile(each.latencies_s, share)) for each in measured) * 1000 for share in (50, 95)
            )
            cells = (name, way, str(clients), f"{rate:,.0f}", f"{rate * frames.nbytes / 1e6:,.0f}")
            rows.append((*cells, f"{middle:.2f}", f"{late:.2f}"))
            table.add_row(*rows[-1])
    load = os.getloadavg()[0]
    Console().print(table)
    Console().print(f"Load of the machine at the end: {load:.1f} on {os.cpu_count()} cores.")
    if chosen.out is not None:
        heads = [str(column.header) for column in table.columns]
        lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
        chosen.out.write_text("\n".join(lines) + f"\n\nLoad at the end: {load:.1f} on {os.cpu_count()} cores.\n")


if __name__ == "__main__":
    main()
