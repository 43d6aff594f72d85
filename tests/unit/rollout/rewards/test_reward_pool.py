from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import PluginError
from cosmos_core.protocols import Completion
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.types import Array, Message, Payload, Prompt, SampleStatus

PLUGIN = """
import asyncio, os, sys, time

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
            return Score(value=float(rest), details={"a": 1})
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
        if kind == "sleep":
            time.sleep(float(rest))
            return 1.0
        if kind == "exit":
            os._exit(3)
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
        patch.setenv("PYTHONPATH", str(folder))
        yield


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

    def make(*, num_workers=1, timeout_s=5.0, rewards=None):
        configs = rewards or [RewardConfig(plugin="obedient", timeout_s=timeout_s)]
        pool = RewardPool(configs, num_workers=num_workers, seed=0)
        pool.start()
        pools.append(pool)
        return Scorer(pool)

    yield make
    children = [child for pool in pools for child in (each._line._process for each in pool._workers)]
    for pool in pools:
        pool.close()
    assert all(child.poll() is not None for child in children)


OK, FAILED, LATE = SampleStatus.OK, SampleStatus.REWARD_FAILED, SampleStatus.REWARD_TIMEOUT


def test_scores_come_back_in_order_without_torch(shared):
    pool = shared
    values = [outcome.value for outcome in pool.score(*(f"number {n}" for n in range(100)))]
    assert values == [float(n) for n in range(100)]
    (scored,) = pool.score("score 2.5")
    assert (scored.value, scored.detail) == (2.5, "a: 1")
    assert pool.score("surrogate")[0].detail == 'a: "?"'
    assert pool.value("torch") == 0.0
    assert pool.pool.scoring_s > 0


def test_a_reward_sees_the_prompt_and_payload(shared):
    pool = shared
    prompt = Prompt(text=(Message(role="user", content="abc"),), reference={"answer": 4})
    assert pool.value("prompt", prompt=prompt) == 7.0
    assert pool.value("units", num_units=5) == 5.0
    array = Array(dtype="uint8", shape=(3,), data=memoryview(bytes([1, 2, 4])))
    assert pool.value("payload", payload=Payload(kind="media", arrays={"x": array})) == 7.0


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("raise rats", "ValueError: cannot read rats"),
        ("number nan", "the score is not finite: nan"),
        ("number -inf", "the score is not finite: -inf"),
        ("text high", "the score is no number but 'high'"),
        ("none", "the score is no number but None"),
        ("async-raise", "KeyError: 'lost'"),
        ("huge", "OverflowError: int too large"),
        ("async-huge", "OverflowError: int too large"),
        ("circular", "ValueError: Circular reference detected"),
        ("exit", r"the reward ended its process \(exit code 3\)"),
        ("segfault", r"the reward ended its process \(signal SIGSEGV\)"),
    ],
)
def test_a_failure_is_a_status_of_that_completion_alone(shared, text, detail):
    found = shared.score("number 1", text, "number 2", "async 0.01", "number 3")
    assert [outcome.status for outcome in found] == [OK, FAILED, OK, OK, OK]
    assert [outcome.value for outcome in found] == [1.0, None, 2.0, 0.01, 3.0]
    assert re.search(detail, found[1].detail)


@pytest.mark.parametrize("text", ["hang", "async-hang", "async-block"])
def test_a_hang_is_a_timeout_of_that_completion_alone(scorer, text):
    pool = scorer(timeout_s=1.5)
    found = pool.score("number 1", "async 0.1", text, "number 2", "async 0.05", "number 3")
    assert [outcome.status for outcome in found] == [OK, OK, LATE, OK, OK, OK]
    assert "1.5 s" in found[2].detail


def test_every_hang_among_many_is_found(scorer):
    texts = ["hang" if n % 7 == 3 else f"number {n}" for n in range(21)]
    found = scorer(num_workers=2, timeout_s=1.0).score(*texts)
    assert [outcome.status for outcome in found] == [LATE if text == "hang" else OK for text in texts]


def test_a_slow_score_within_its_time_is_no_timeout_though_others_wait(scorer):
    found = scorer(timeout_s=1.5).score(*["sleep 0.4"] * 6)
    assert {outcome.status for outcome in found} == {OK}


def test_an_answer_that_came_in_time_counts_though_nobody_looked_meanwhile(scorer):
    found = scorer(num_workers=2, timeout_s=1.0)
    end = time.monotonic() + 20
    while not found.pool.is_ready:
        assert time.monotonic() < end
        time.sleep(0.01)
    slow = found.submit("sleep 0.3")
    held_up = Completion(prompt=Prompt(text="p"), text="number 3")
    found.pool.submit([held_up], lambda _: time.sleep(1.5))
    assert slow()[0].status is OK


def test_coroutines_run_beside_each_other(shared):
    pool = shared
    begin = time.monotonic()
    found = pool.score(*["async 0.2"] * 40)
    assert {outcome.value for outcome in found} == {0.2}
    assert time.monotonic() - begin < 40 * 0.2 / 2


def test_plain_scores_hold_up_no_coroutine(scorer):
    """A coroutine waits five times for a moment, while plain scores take longer than it may."""
    found = scorer(timeout_s=1.5).score("async-steps 5", *["sleep 0.4"] * 6)
    assert [outcome.status for outcome in found] == [OK] * 7


def test_a_score_that_ends_the_loop_of_another_is_a_failure_of_it(shared):
    found = shared.score("stop", "number 2")
    assert [outcome.status for outcome in found] == [FAILED, OK]
    assert "StopIteration" in found[0].detail


def test_several_rewards_each_with_its_options(scorer):
    configs = [RewardConfig(plugin="obedient"), RewardConfig(plugin="obedient", options={"scale": -2.0})]
    found = scorer(rewards=configs).score("number 3", "number 4")
    assert [[outcome.value for outcome in row] for row in found] == [[3.0, -6.0], [4.0, -8.0]]


def test_workers_import_nothing_from_the_current_folder(scorer, tmp_path, monkeypatch):
    (tmp_path / "obedient_plugin.py").write_text("raise SystemExit('imported from the current folder')\n")
    monkeypatch.chdir(tmp_path)
    assert scorer().value("number 3") == 3.0


def test_a_worker_killed_from_outside_is_replaced_and_nobody_blamed(shared):
    for _ in range(2):
        killed = int(shared.value("pid"))
        os.kill(killed, signal.SIGKILL)
        found = shared.score(*["number 5"] * 20)
        assert {outcome.value for outcome in found} == {5.0}
        assert int(shared.value("pid")) != killed


def test_rewards_that_cannot_be_loaded_are_told(scorer):
    for config, message in (
        (RewardConfig(plugin="obedien"), "obedient"),
        (RewardConfig(plugin="obedient", options={"scal": 1.0}), "reward.0.options.scal.*scale"),
        (
            RewardConfig(plugin="obedient", name="mine", options={"scale": 13.0}),
            "reward mine could not load: OSError: no s",
        ),
        (RewardConfig(plugin="obedient", name="mine", options={"scale": 14.0}), "^reward mine: no key$"),
        (RewardConfig(plugin="obedient", name="mine", options={"scale": 15.0}), "^reward mine: no key$"),
        (
            RewardConfig(plugin="obedient", name="mine", options={"scale": 16.0}),
            "^reward mine: reward minerals: no key$",
        ),
    ):
        pool = scorer(rewards=[config])
        with pytest.raises(PluginError, match=message):
            pool.score("number 1")


def test_a_worker_loads_before_it_scores(shared):
    pid, loaded = shared.score("pid", "loaded")
    assert loaded.value > 0
    assert pid.status is OK


def test_blame_is_logged_by_the_name_that_the_recipe_gives(scorer, caplog):
    configs = [RewardConfig(plugin="obedient", name="strict", timeout_s=0.2)]
    (found,) = scorer(rewards=configs).score("hang")
    assert found.detail == "no score within 0.2 s"
    assert "strict: no score within 0.2 s" in caplog.text


def test_a_row_that_cannot_be_sent_is_a_failure_of_it(shared):
    found = shared.score("number 1", prompt=Prompt(text="p", reference=2**70))
    assert found[0].status is FAILED
    assert "cannot be sent" in found[0].detail


def test_workers_die_with_their_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from cosmos_core.config.schema import RewardConfig\n"
        "from cosmos_core.protocols import Completion\n"
        "from cosmos_core.rollout.rewards.pool import RewardPool\n"
        "from cosmos_core.types import Prompt\n"
        "pool = RewardPool([RewardConfig(plugin='obedient', timeout_s=100)], num_workers=1, seed=0)\n"
        "pool.start()\n"
        "pids = []\n"
        "pool.submit([Completion(prompt=Prompt(text=''), text='pid')], pids.extend)\n"
        "while not pids: time.sleep(0.01)\n"
        "pool.submit([Completion(prompt=Prompt(text=''), text='hang')], print)\n"
        "time.sleep(0.2)\n"
        "print(int(pids[0][0].value), flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.is_running()
        parent.kill()
        parent.wait()
    worker.wait(5)
