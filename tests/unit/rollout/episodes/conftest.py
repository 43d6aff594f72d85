"""An environment that does what it is told, in worker processes."""

from __future__ import annotations

import os
import queue
import time

import pytest

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.rollout.episodes.messages import Opened
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.types import Prompt

PLUGIN = """
import asyncio, os, time

import attrs

from cosmos_core.protocols import EnvironmentCapabilities, Provider, Turn, hookimpl


@attrs.frozen(kw_only=True)
class Options:
    folder: str = ""


class Obedient:
    def __init__(self, options, context):
        self.folder, self.turns = options.folder, 0

    async def reset(self, prompt, seed):
        self.name = prompt.text if isinstance(prompt.text, str) else prompt.text[0].content
        if self.name == "raise":
            raise ValueError("no such task")
        if self.name == "bytes":
            return b"words"
        return None if self.name == "silent" else f"{self.name} {seed}"

    async def step(self, text):
        self.turns += 1
        kind, _, rest = text.partition(" ")
        if kind == "pid":
            return Turn(observation=str(os.getpid()))
        if kind == "turns":
            return Turn(observation=str(self.turns), reward=0.5, detail="counted")
        if kind == "done":
            return Turn(done=True, reward=int(rest))
        if kind == "raise":
            raise KeyError("lost")
        if kind == "exit":
            os._exit(3)
        if kind == "hang":
            while True:
                time.sleep(0.01)
        if kind == "wait":
            await asyncio.sleep(1000)
        if kind == "short":
            await asyncio.sleep(0.2)
            return Turn(observation="awake")
        if kind == "thread":
            await asyncio.to_thread(time.sleep, float(rest))
            return Turn(observation="slept")
        if kind == "thread-stop":
            await asyncio.to_thread(next, iter(()))
        if kind == "none":
            return None
        if kind == "mute":
            return Turn()
        if kind == "reward":
            return Turn(done=True, reward={"nan": float("nan"), "-inf": float("-inf"), "text": "1"}.get(rest, True))
        if kind == "number":
            return Turn(observation=7)
        if kind == "role":
            return Turn(observation="8", role=rest)
        if kind == "cancelled":
            waits = asyncio.ensure_future(asyncio.sleep(1000))
            waits.cancel()
            await waits
        if kind == "leave":
            raise SystemExit(5)
        if kind == "closed":
            os.closerange(3, 4096)
        if kind == "long":
            return Turn(observation="x" * (1 << 20) + "y")
        if kind == "surrogate":
            return Turn(observation="\\ud800")
        if kind == "odd-detail":
            return Turn(done=True, detail="\\ud800")
        if kind == "echo":
            return Turn(observation=rest)

    async def close(self):
        if self.name == "stay":
            await asyncio.sleep(1000)
        if self.name == "slow":
            await asyncio.sleep(0.3)
        if self.folder:
            open(os.path.join(self.folder, f"{self.name}-{self.turns}"), "w").close()


@hookimpl
def cosmos_environment():
    return Provider(create=Obedient, options=Options, capabilities=EnvironmentCapabilities(rewards=True))
"""


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    """An installed environment, for the workers only."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "obedient-1.0.dist-info"
    info.mkdir()
    (folder / "obedient_environment.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: obedient\nVersion: 1.0\nRequires-Dist: cosmos-core\n")
    (info / "entry_points.txt").write_text("[cosmos_core.environments]\nobedient = obedient_environment\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


class Player:
    """Asks one thing after the other."""

    def __init__(self, pool):
        self.pool, self.replies = pool, queue.SimpleQueue()

    def wait(self):
        end = time.monotonic() + 30
        while True:
            try:
                return self.replies.get(timeout=0.05)
            except queue.Empty:
                self.pool.check()
                assert time.monotonic() < end

    def open(self, text="task", seed=7):
        episode = self.pool.open(Prompt(text=text), seed, self.replies.put)
        return episode, self.wait()

    def begin(self, text="task"):
        episode, reply = self.open(text)
        assert isinstance(reply, Opened)
        return episode

    def act(self, episode, text):
        self.pool.act(episode, text, self.replies.put)
        return self.wait()


@pytest.fixture
def player():
    pools = []

    def make(*, workers=1, timeout_s=5.0, **options):
        config = EnvironmentConfig(plugin="obedient", timeout_s=timeout_s, workers=workers, options=options)
        pool = EnvironmentPool(config, seed=0)
        pool.start()
        pools.append(pool)
        return Player(pool)

    yield make
    children = [worker._process for pool in pools for worker in pool._workers]
    for pool in pools:
        pool.close()
    assert all(child.poll() is not None for child in children)


@pytest.fixture(scope="module")
def shared():
    """A pool that no failure of these tests breaks."""
    pool = EnvironmentPool(EnvironmentConfig(plugin="obedient", timeout_s=5.0), seed=0)
    pool.start()
    yield Player(pool)
    pool.close()
