"""Dialogues of `cosmos eval`: each held-out row begins as it does in the evaluations of a run."""

from __future__ import annotations

import itertools
import queue
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from cosmos_core.config.schema import (
    EnvironmentConfig,
    EvaluationConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
)
from cosmos_core.protocols import FinishReason, Generated, Sampling
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.rollout.generation import Generation, GenerationParts, LeaseRecipes
from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.transport.directives import Lease
from cosmos_core.types import Array, Message, Payload, Prompt, SampleStatus
from cosmos_service_tools.evaluation import _complete, play
from cosmos_service_tools.served import Served

PLUGIN = """
from cosmos_core.protocols import Provider, Turn, hookimpl
from cosmos_core.types import Message


class Dealer:
    def __init__(self, options, context):
        pass

    async def reset(self, prompt, seed):
        return Message(role="user", content=f"card {seed}", media=prompt.media)

    async def step(self, text):
        return Turn(done=True)

    async def close(self):
        pass


@hookimpl
def cosmos_environment():
    return Provider(create=Dealer)
"""
DEALER = EnvironmentConfig(plugin="dealer", timeout_s=10.0)
ROWS = (2, 0, 5)
RUN_SEED = 11


@pytest.fixture(autouse=True)
def plugin(tmp_path, monkeypatch):
    """An installed environment that begins with its seed."""
    info = tmp_path / "dealer-1.0.dist-info"
    info.mkdir()
    (tmp_path / "dealer_environment.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dealer\nVersion: 1.0\nRequires-Dist: cosmos-core\n")
    (info / "entry_points.txt").write_text("[cosmos_core.environments]\ndealer = dealer_environment\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


def ints(values):
    return Array(dtype="int32", shape=(len(values),), data=np.int32(values).tobytes())


class Model:
    """A letter is a token."""

    def encode(self, prompt):
        text = prompt.text if isinstance(prompt.text, str) else "".join(turn.content for turn in prompt.text)
        return Payload(kind="tokens", arrays={"prompt": ints([ord(letter) for letter in text])})

    def decode(self, payload):
        return ""

    def encode_turns(self, prompt, written, turns):
        return [ord(letter) for turn in turns for letter in turn.content]

    def read_turn(self, prompt, ids):
        raise AssertionError("environments are given text")


class Done:
    def __init__(self, request):
        self.request = request

    def result(self, timeout_s=None):
        logprob = Array(dtype="float32", shape=(1,), data=np.float32([-1]).tobytes())
        arrays = {**self.request.prompt.arrays, "completion": ints([9]), "logprobs": logprob, "versions": ints([0])}
        payload = Payload(kind="tokens", arrays=arrays)
        return [Generated(payload=payload, reason=FinishReason.STOP, oldest_version=0, newest_version=0, num_units=1)]

    def add_done_callback(self, callback):
        callback(self)


class Engine:
    """Ends each turn at once, and keeps the texts of the prompts."""

    def __init__(self):
        self.prompts = []

    def submit(self, requests):
        for each in requests:
            tokens = np.frombuffer(each.prompt.arrays["prompt"].data, np.int32)
            self.prompts.append("".join(map(chr, tokens.tolist())))
        return [Done(each) for each in requests]

    def abort(self, names):
        pass

    def health(self):
        pass

    def stats(self):
        return SimpleNamespace(busy_s=0.0)


def row(index):
    return Prompt(text=f"row {index}: ")


def beginnings_in_a_run():
    """How the environment begins with each row, in an evaluation of a run."""
    engine, version_lock, reports = Engine(), VersionLock(), queue.SimpleQueue()
    version_lock.confirm(1)
    pool = EnvironmentPool(DEALER, seed=RUN_SEED)
    rewards = SimpleNamespace(
        submit=lambda completions, done: done([[Outcome(value=1.0, status=SampleStatus.OK)] for _ in completions]),
        scoring_s=0.0,
    )
    recipe = SimpleNamespace(
        run=RunConfig(name="r", steps=1, seed=RUN_SEED),
        reward=(SimpleNamespace(name="math", label="math", plugin="math", weight=1.0, gate=None),),
        environment=DEALER,
        rollout=RolloutConfig(),
        evaluation=EvaluationConfig(max_units=7),
        policy=PolicyConfig(),
    )
    generation = Generation(
        GenerationParts(
            recipe=recipe,
            stage=0,
            context_length=100,
            model=Model(),
            dataset=SimpleNamespace(row=lambda split, index: row(index)),
            recipes=LeaseRecipes(recipe, lambda _: None),
            engine=engine,
            pool=rewards,
            payloads=SimpleNamespace(release_except=lambda leases: None),
            version_lock=version_lock,
            report=reports.put,
            environments=pool,
        )
    )
    pool.start()
    generation.start()
    try:
        numbers = itertools.count(1)
        leases = [Lease(lease=next(numbers), purpose="evaluation", position=9, row=each, version=1) for each in ROWS]
        generation.reconcile(leases, ())
        for _ in ROWS:
            reports.get(timeout=20)
    finally:
        generation.close()
        pool.close()
    return sorted(engine.prompts)


def beginnings_afterwards():
    """The same in `cosmos eval`."""
    model, engine = Model(), Engine()
    served = Served(model=model, engine=engine, context_length=100)
    asked = [(each, row(each), model.encode(row(each))) for each in ROWS]
    played = play(served, DEALER, asked, Sampling(temperature=0.0, max_units=7), seed=RUN_SEED, name="run")
    assert [each.status for each in played] == ["ok"] * len(ROWS)
    return sorted(engine.prompts)


def test_each_row_begins_as_in_the_evaluations_of_its_run_and_otherwise_than_others():
    found = beginnings_afterwards()
    assert found == beginnings_in_a_run()
    assert len({text.partition("card ")[2] for text in found}) == len(ROWS)


class ImageModel(Model):
    """An image is a unit more."""

    def encode_seen_turns(self, prompt, written, turns):
        shown = ints([len(turn.media) for turn in turns])
        return Payload(
            kind="tokens", arrays={"prompt": ints([7, *self.encode_turns(prompt, written, turns)]), "shown": shown}
        )

    def join(self, parts):
        made = np.concatenate([np.frombuffer(part.arrays["prompt"].data, np.int32) for part in parts])
        return Payload(kind="tokens", arrays={"prompt": ints(made), "shown": ints([1])})


def test_rows_that_show_images_are_played_by_a_model_that_sees_them_and_left_out_by_another():
    recipe = SimpleNamespace(
        run=RunConfig(name="r", steps=1, seed=RUN_SEED),
        environment=DEALER,
        evaluation=EvaluationConfig(max_units=7),
        rollout=RolloutConfig(),
    )
    in_turn = (Message(role="user", content="?", media=("b.png",)),)
    rows = [(0, attrs.evolve(row(0), media=("a.png",))), (1, Prompt(text=in_turn)), (2, row(2))]
    for sees, number in ((True, 3), (False, 1)):
        served = Served(model=ImageModel(), engine=Engine(), context_length=100, sees=sees)
        answered = _complete(served, rows, SimpleNamespace(recipe=recipe))
        assert [prompt for prompt, _ in answered] == [prompt for _, prompt in rows[-number:]]
        assert [each.status for _, each in answered] == ["ok"] * number
        assert sum("\a" in text for text in served.engine.prompts) == sees
