"""A reward that does what it is told, in worker processes."""

from __future__ import annotations

import os
import threading
import time

import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.protocols import Completion
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.types import Prompt

PLUGIN = """
import asyncio, os, re, sys, time

import attrs

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Provider, Score, hookimpl


@attrs.frozen(kw_only=True)
class Options:
    scale: float = 1.0


class Obedient:
    def __init__(self, options, context):
        self.scale, self.name = options.scale, context.name

    def score(self, completion):
        kind, _, rest = completion.text.partition(" ")
        if kind == "number":
            return float(rest) * self.scale
        if kind == "score":
            return Score(value=float(rest), details={"a": 1, "b": [1 / 3, {"c": -12345.678}, 2e-7 / 3]})
        if kind == "torch":
            return float("torch" in sys.modules)
        if kind == "pid":
            return os.getpid()
        if kind == "payload":
            return float(sum(completion.payload.arrays["x"].data))
        if kind == "prompt":
            return float(completion.prompt.reference["answer"] + len(completion.prompt.text[0].content))
        if kind == "raise":
            raise ValueError("cannot read " + rest)
        if kind == "stop":
            raise StopIteration
        if kind == "hang":
            while True:
                time.sleep(0.01)
        if kind == "busy":
            return re.match("(a+)+$", "a" * 40 + "b")
        if kind == "sleep":
            time.sleep(float(rest))
            return 1.0
        if kind == "exit":
            os._exit(3)
        if kind == "garble":
            os.write(int(sys.argv[1]), bytes([255] * 4))
            time.sleep(30)
        if kind == "segfault":
            os.kill(os.getpid(), 11)
        if kind == "text":
            return rest
        if kind == "none":
            return None
        if kind == "huge":
            return 10**400
        if kind == "circular":
            details = {}
            return Score(value=1.0, details={"a": details.setdefault("a", details)})
        if kind == "surrogate":
            return Score(value=1.0, details={"a": chr(0xD800)})
        if kind == "units":
            return completion.num_units
        if kind == "loaded":
            return self.loaded
        if kind == "async-huge":
            return self.huge()
        if kind == "async":
            return self.later(float(rest))
        if kind == "async-steps":
            return self.wait(int(rest))
        if kind == "async-hang":
            return self.later(1000.0)
        if kind == "async-raise":
            return self.fail()
        if kind == "hold":
            return self.hold(float(rest)) if self.name == "a" else 1.0
        if kind == "async-block":
            return self.block()

    async def later(self, delay):
        await asyncio.sleep(delay)
        return delay

    async def wait(self, times):
        for _ in range(times):
            await asyncio.sleep(0.01)
        return times

    async def huge(self):
        await asyncio.sleep(0)
        return 10**400

    def load(self):
        if self.scale == 13.0:
            raise OSError("no such weights")
        if self.scale == 14.0:
            raise ConfigError("no key")
        if self.scale == 15.0:
            raise ConfigError("reward mine: no key")
        if self.scale == 16.0:
            raise ConfigError("reward minerals: no key")
        self.loaded = os.getpid()

    async def fail(self):
        await asyncio.sleep(0)
        raise KeyError("lost")

    async def hold(self, held_s):
        await asyncio.sleep(0.05)
        time.sleep(held_s)
        os._exit(3)

    async def block(self):
        await asyncio.sleep(0)
        while True:
            time.sleep(0.01)


@hookimpl
def cosmos_reward():
    return Provider(create=Obedient, options=Options)
"""


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    """An installed reward, for the workers only."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "obedient-1.0.dist-info"
    info.mkdir()
    (folder / "obedient_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: obedient\nVersion: 1.0\nRequires-Dist: cosmos-core\n")
    (info / "entry_points.txt").write_text("[cosmos_core.rewards]\nobedient = obedient_plugin\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder


class Scorer:
    def __init__(self, pool):
        self.pool = pool

    def submit(self, *texts, **fields):
        done, outcomes = threading.Event(), []
        completions = [Completion(**{"prompt": Prompt(text="p"), "text": text, **fields}) for text in texts]
        self.pool.submit(completions, lambda found: (outcomes.extend(found), done.set()))

        def wait(timeout_s=20.0):
            end = time.monotonic() + timeout_s
            while not done.wait(0.05):
                self.pool.check()
                assert time.monotonic() < end
            return [row[0] if len(row) == 1 else row for row in outcomes]

        return wait

    def score(self, *texts, **fields):
        return self.submit(*texts, **fields)()

    def value(self, text, **fields):
        return self.score(text, **fields)[0].value


@pytest.fixture(scope="module")
def shared():
    """A pool with two workers that were used before: they survive every failure of these tests."""
    pool = RewardPool([RewardConfig(plugin="obedient", timeout_s=5.0)], num_workers=2, seed=0)
    pool.start()
    yield Scorer(pool)
    pool.close()


@pytest.fixture
def scorer():
    pools = []

    def make(*, num_workers=1, timeout_s=5.0, rewards=None, **options):
        configs = rewards or [RewardConfig(plugin="obedient", timeout_s=timeout_s)]
        pool = RewardPool(configs, num_workers=num_workers, seed=0, **options)
        pool.start()
        pools.append(pool)
        return Scorer(pool)

    yield make
    children = [child for pool in pools for child in (each._process for each in pool._workers)]
    for pool in pools:
        pool.close()
    assert all(child.poll() is not None for child in children)
