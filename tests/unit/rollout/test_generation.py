from __future__ import annotations

import collections
import re
import threading
import time
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from cosmos_core.config.schema import (
    DatasetConfig,
    EnvironmentConfig,
    EvaluationConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from cosmos_core.errors import DataError, EngineError, ReplicaError
from cosmos_core.models.tokens import array_of, values
from cosmos_core.protocols import EnvironmentCapabilities, FinishReason, Generated
from cosmos_core.rollout import generation
from cosmos_core.rollout.episodes.messages import Answered, Failed, Opened
from cosmos_core.rollout.generation import Generation, GenerationParts, LeaseRecipes
from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.transport.directives import Lease
from cosmos_core.transport.reports import GroupFailed, GroupFinished
from cosmos_core.types import Array, Message, Payload, Prompt, SampleStatus
from tests import scripted

SCORED = Outcome(value=1.0, status=SampleStatus.OK)


class Handle(scripted.Handle):
    def finish(self, reason=FinishReason.STOP):
        made = scripted.generated(self.request, [0], is_whole=True, version=1, number=0)
        made.payload.arrays["turn_rewards"] = array_of(np.ones(1))
        super().finish([attrs.evolve(made, reason=reason)] * self.request.sampling.num_samples)


class Engine:
    def __init__(self):
        self.handles, self.aborted = {}, []

    def submit(self, requests):
        handles = [Handle(request) for request in requests]
        if any(array.shape == (30,) for request in requests for array in request.prompt.arrays.values()):
            raise EngineError("30 units have no room in the cache")
        self.handles.update((handle.request.request_id, handle) for handle in handles)
        return handles

    def abort(self, names):
        self.aborted += names

    def health(self):
        return None

    def stats(self):
        return SimpleNamespace(busy_s=2.0)


class Pool:
    scoring_s = 3.0

    def __init__(self):
        self.value = 1.0

    def submit(self, completions, done):
        done([[Outcome(value=self.value, status=SampleStatus.OK)] for _ in completions])


class Payloads:
    def __init__(self):
        self.store, self.order = {}, []

    def put(self, lease, payloads):
        self.store[lease] = payloads
        self.order.append(("put", lease))

    def release_except(self, leases):
        self.store = {lease: held for lease, held in self.store.items() if lease in leases}


class Rows:
    def row(self, split, index):
        if index == 13:
            raise DataError("rows.jsonl line 13: no prompt")
        if index >= 100:
            raise IndexError(f"{split} has no row {index}")
        if index == 14:
            return Prompt(text="p", media=("a.png",))
        if index == 15:
            return Prompt(text=(Message(role="user", content="p", media=("a.png",)),))
        return Prompt(text="p" * index, reference=split)


class Fixture:
    def __init__(self):
        self.engine, self.pool, self.payloads, self.version_lock = Engine(), Pool(), Payloads(), VersionLock()
        self.reports, self.arrived = [], threading.Condition()
        self.drop = None
        recipe = SimpleNamespace(
            run=RunConfig(name="r", steps=1, seed=5),
            reward=(RewardConfig(plugin="math", gate=1.0),),
            environment=None,
            dataset=DatasetConfig(plugin="rows", min_prompt_units=2, max_prompt_units=43),
            rollout=RolloutConfig(group_size=3, sampling=SamplingConfig(max_units=10, temperature=0.9)),
            evaluation=EvaluationConfig(max_units=7),
            policy=PolicyConfig(micro_batch_units=45),
        )
        self.generation = Generation(
            GenerationParts(
                recipe=recipe,
                stage=1,
                context_length=50,
                model=SimpleNamespace(encode=self.encode, decode=lambda payload: "answer"),
                dataset=Rows(),
                recipes=LeaseRecipes(recipe, lambda _: SimpleNamespace(admit=lambda group: self.drop)),
                engine=self.engine,
                pool=self.pool,
                payloads=self.payloads,
                version_lock=self.version_lock,
                report=self.report,
            )
        )

    def encode(self, prompt):
        array = Array(dtype="int32", shape=(len(prompt.text),), data=bytes(4 * len(prompt.text)))
        return Payload(kind="tokens", arrays={"prompt": array})

    def report(self, report):
        with self.arrived:
            self.reports.append(report)
            self.payloads.order.append(("report", report.lease))
            self.arrived.notify_all()

    def wait_reports(self, number):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.reports) >= number, 5)
        return self.reports


@pytest.fixture
def rig():
    made = Fixture()
    made.generation.start()
    yield made
    made.generation.close()


def train(lease, row=4):
    return Lease(lease=lease, purpose="train", position=row, row=row, version=-1)


def evaluation(lease, version, row=4):
    return Lease(lease=lease, purpose="evaluation", position=row, row=row, version=version)


def test_a_group_is_generated_scored_held_and_only_then_reported(rig):
    rig.generation.reconcile([train(7)], ())
    handle = rig.engine.handles["7"]
    sampling = handle.request.sampling
    assert (sampling.num_samples, sampling.temperature, sampling.max_units) == (3, 0.9, 10)
    handle.finish()
    (report,) = rig.wait_reports(1)
    assert isinstance(report, GroupFinished)
    assert report.drop == ""
    assert [sample.reward for sample in report.samples] == [1.0] * 3
    assert (report.text, report.busy_s, report.scoring_s) == ("answer", 2.0, 3.0)
    assert rig.payloads.order == [("put", 7), ("report", 7)]
    rig.pool.value = 0.0
    rig.generation.reconcile([train(7), train(8)], ())
    rig.engine.handles["8"].finish()
    rig.wait_reports(2)
    held = {lease: [values(each, "turn_rewards").tolist() for each in of] for lease, of in rig.payloads.store.items()}
    assert held == {7: [[1.0]] * 3, 8: [[0.0]] * 3}, "below its gate, turns have no rewards, either"


def test_time_in_which_all_that_is_in_flight_waits_for_scores_is_told_once(rig, monkeypatch):
    now, asked = [100.0], []
    monkeypatch.setattr(generation.time, "monotonic", lambda: now[0])
    rig.pool.submit = lambda completions, done: asked.append(lambda: done([[SCORED]] * len(completions)))

    def scoring(number):
        deadline = time.perf_counter() + 5
        while len(asked) < number and time.perf_counter() < deadline:
            time.sleep(0.001)
        assert len(asked) == number

    rig.generation.reconcile([train(7), train(8)], ())
    now[0] += 1  # both are generated
    rig.engine.handles["7"].finish()
    scoring(1)
    now[0] += 10  # one still is
    rig.engine.handles["8"].finish()
    scoring(2)
    now[0] += 100  # both wait for scores
    asked[0]()
    assert rig.wait_reports(1)[0].awaited_s == 100.0
    now[0] += 1000  # the other one does
    rig.generation.reconcile([train(8), train(9)], ())
    now[0] += 10000  # another one is generated
    asked[1]()
    assert rig.wait_reports(2)[1].awaited_s == 1000.0
    rig.engine.handles["9"].finish()
    scoring(3)
    rig.generation.reconcile([], ())
    now[0] += 1  # there is nothing to wait for
    rig.generation.reconcile([train(10)], ())
    rig.engine.handles["10"].finish()
    scoring(4)
    asked[3]()
    assert rig.wait_reports(3)[2].awaited_s == 0.0


def test_a_lease_is_drawn_and_admitted_with_the_values_that_it_carries(rig):
    asked = []

    def recipes_of(settings):
        temperature = settings.get("rollout.sampling.temperature", 0.9)
        sampling = SamplingConfig(max_units=10, temperature=temperature)
        admit = lambda group: asked.append(temperature)  # noqa: E731 - one word of a lease's recipes
        recipe = SimpleNamespace(rollout=RolloutConfig(group_size=3, sampling=sampling))
        return SimpleNamespace(recipe=recipe, algorithm=SimpleNamespace(admit=admit))

    rig.generation._parts = attrs.evolve(rig.generation._parts, recipes=SimpleNamespace(of=recipes_of))
    cold = attrs.evolve(train(8), settings={"rollout.sampling.temperature": 0.5})
    rig.generation.reconcile([train(7), cold], ())
    drawn = {name: handle.request.sampling.temperature for name, handle in rig.engine.handles.items()}
    assert drawn == {"7": 0.9, "8": 0.5}
    rig.engine.handles["8"].finish()
    rig.wait_reports(1)
    assert asked == [0.5]


def test_the_seed_depends_on_the_position_and_not_on_the_lease(rig):
    rig.generation.reconcile([train(1, row=4), train(2, row=4), train(3, row=5)], ())
    seeds = {name: handle.request.seed for name, handle in rig.engine.handles.items()}
    assert seeds["1"] == seeds["2"] != seeds["3"]


def test_a_directive_seen_again_starts_nothing_again(rig):
    for _ in range(3):
        rig.generation.reconcile([train(1)], ())
    assert len(rig.engine.handles) == 1
    rig.engine.handles["1"].finish()
    rig.wait_reports(1)
    rig.engine.handles.clear()
    rig.generation.reconcile([train(1)], ())
    assert not rig.engine.handles
    assert rig.payloads.store.keys() == {1}
    rig.generation.reconcile([], (1,))
    assert rig.payloads.store.keys() == {1}
    rig.generation.reconcile([], ())
    assert not rig.payloads.store


def test_a_lease_that_is_taken_away_is_aborted_and_never_reported(rig):
    rig.generation.reconcile([train(1), train(2)], ())
    rig.generation.reconcile([train(2)], ())
    assert rig.engine.aborted == ["1"]
    rig.engine.handles["1"].finish(FinishReason.ABORTED)
    rig.engine.handles["2"].finish()
    (report,) = rig.wait_reports(1)
    assert report.lease == 2
    assert rig.payloads.store.keys() == {2}
    assert rig.generation.num_active == 0


def test_a_dropped_group_keeps_no_payload_and_each_of_its_samples_is_kept_for_people(rig):
    put = []
    kept = SimpleNamespace(name="rollout-0", put=lambda *of_group: put.append(of_group), close=lambda: None)
    rig.generation._parts = attrs.evolve(rig.generation._parts, samples=kept)
    rig.drop = "all rewards equal"
    rig.generation.reconcile([train(1)], ())
    rig.engine.handles["1"].finish()
    (report,) = rig.wait_reports(1)
    assert report.drop == "all rewards equal"
    assert not rig.payloads.store
    rig.generation.close()
    ((rows, num_bytes),) = put
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert num_bytes > 3 * 1024
    names = ("lease", "row", "purpose", "drop", "reward", "rewards", "completion", "replica", "reference")
    told = (1, 4, "train", "all rewards equal", 1.0, [("math", 1.0)], "answer", "rollout-0", '"train"')
    assert [tuple(row[name] for name in names) for row in rows] == [told] * 3


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (13, "bad_row", "line 13"),
        (14, "bad_row", "images or videos, which the engine does not take"),
        (15, "bad_row", "images or videos, which the engine does not take"),
        (100, "bad_row", "no row 100"),
        (0, "bad_row", "the prompt is empty"),
        (1, "prompt_too_short", "row 1: a prompt of 1 is below dataset.min_prompt_units of 2"),
        (44, "prompt_too_long", "row 44: a prompt of 44 is above dataset.max_prompt_units of 43"),
        (41, "prompt_too_long", "prompt of 41 .* of up to 10 .* context length of 50"),
        (36, "prompt_too_long", "prompt of 36 .* policy.micro_batch_units of 45"),
        (30, "prompt_too_long", "row 30: 30 units have no room in the cache"),
    ],
)
def test_a_prompt_that_cannot_be_completed_is_told_once(rig, row, reason, detail):
    for _ in range(2):
        rig.generation.reconcile([train(1, row=row), train(2)], ())
    (report,) = rig.reports
    assert isinstance(report, GroupFailed)
    assert (report.lease, report.reason) == (1, reason)
    assert re.search(detail, report.detail)
    assert list(rig.engine.handles) == ["2"]


def test_held_out_prompts_of_any_length_are_evaluated(rig):
    rig.version_lock.confirm(3)
    rig.generation.reconcile([evaluation(1, version=3, row=1)], ())
    assert rig.reports == []
    assert list(rig.engine.handles) == ["1"]
    # One that the engine refuses holds its version no longer than the others.
    rig.generation.reconcile([evaluation(1, version=3, row=1), evaluation(2, version=3, row=30)], ())
    assert [report.lease for report in rig.reports] == [2]
    rig.engine.handles["1"].finish()
    rig.wait_reports(2)
    with rig.version_lock.changing(4):
        assert rig.generation.num_active == 0


def test_an_evaluation_waits_for_its_version_and_holds_it(rig):
    lease = evaluation(1, version=4)
    rig.version_lock.confirm(3)
    rig.generation.reconcile([lease], ())
    assert not rig.engine.handles
    rig.version_lock.confirm(4)
    rig.generation.reconcile([lease], ())
    request = rig.engine.handles["1"].request
    assert (request.sampling.temperature, request.sampling.num_samples, request.sampling.max_units) == (0.0, 1, 7)
    changed = threading.Event()

    def change():
        with rig.version_lock.changing(5):
            changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    time.sleep(0.05)
    assert not changed.is_set()
    rig.engine.handles["1"].finish()
    assert changed.wait(5)
    thread.join(5)
    (report,) = rig.wait_reports(1)
    assert report.text == "answer"
    assert not rig.payloads.store


def test_an_aborted_evaluation_lets_updates_go_on(rig):
    rig.version_lock.confirm(4)
    rig.generation.reconcile([evaluation(1, version=4)], ())
    rig.generation.reconcile([], ())
    rig.engine.handles["1"].finish(FinishReason.ABORTED)
    with rig.version_lock.changing(5) as may:
        assert may
    assert not rig.reports


def test_an_algorithm_that_raises_is_told_by_check(rig, monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda problem: errors.append(problem.exc_value))

    def broken(group):
        raise ZeroDivisionError("no variance")

    rig.generation._parts = attrs.evolve(
        rig.generation._parts,
        recipes=LeaseRecipes(rig.generation._parts.recipe, lambda _: SimpleNamespace(admit=broken)),
    )
    rig.generation.reconcile([train(1)], ())
    rig.engine.handles["1"].finish()
    end = time.monotonic() + 5
    while not errors and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(ReplicaError, match=r"groups thread failed.*no variance"):
        rig.generation.check()


# -- dialogues --------------------------------------------------------------------------------------------------------


class Environments:
    """Environments whose answers are given by hand."""

    def __init__(self):
        self.asked, self.closed, self.turns = {}, [], collections.Counter()

    def open(self, prompt, seed, answer):
        episode = len(self.asked)
        self.asked[episode] = answer
        answer(Opened(episode=episode, words=None))
        return episode

    def act(self, episode, text, answer):
        self.asked[episode] = answer
        self.turns[episode] += 1

    def forget(self, episode):
        self.closed.append(episode)

    def end(self, episode, **fields):
        whole = {"observation": None, "role": "user", "done": True, "reward": 0.0, "detail": "", **fields}
        self.asked[episode](Answered(episode=episode, **whole))


@pytest.fixture
def talk():
    """A rig whose recipe has an environment."""
    made = Fixture()
    environments = Environments()
    recipe = SimpleNamespace(**{**vars(made.generation._parts.recipe), "environment": GAME})
    model = SimpleNamespace(
        encode=made.encode, decode=lambda payload: "answer", encode_turns=lambda *given: [1, 2, 3], read_turn=print
    )
    made.generation = Generation(
        attrs.evolve(
            made.generation._parts,
            recipe=recipe,
            model=model,
            environments=environments,
            environment=EnvironmentCapabilities(rewards=True),
        )
    )
    made.environments = environments
    made.generation.start()
    yield made
    made.generation.close()


GAME = EnvironmentConfig(plugin="game", weight=0.5)


def until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_group_of_dialogues_is_scored_with_the_environments_own_reward(talk):
    talk.generation.reconcile([train(7)], ())
    until(lambda: "7" in talk.engine.handles)
    talk.engine.handles["7"].finish()
    until(lambda: len(talk.environments.turns) == 3)
    talk.environments.end(0, reward=2.0, detail="won")
    talk.environments.asked[1](Failed(episode=1, timed_out=True, detail="game: no answer within 1 s"))
    talk.environments.end(2)
    (report,) = talk.wait_reports(1)
    first, second, third = report.samples
    assert (first.status, first.reward, first.rewards) == ("ok", 2.0, {"math": 1.0, "game": 2.0})
    assert first.detail == "game: won"
    assert (second.status, second.reward, second.rewards) == ("environment_timeout", None, {})
    assert "no answer within 1 s" in second.detail
    assert (third.reward, third.rewards) == (1.0, {"math": 1.0, "game": 0.0})
    assert len(talk.payloads.store[7]) == 3


def test_an_evaluation_holds_its_version_until_its_dialogue_is_over(talk):
    talk.version_lock.confirm(4)
    talk.generation.reconcile([evaluation(1, version=4)], ())
    until(lambda: "1" in talk.engine.handles)
    talk.engine.handles["1"].finish()
    until(lambda: talk.environments.turns[0] == 1)
    talk.environments.end(0, observation="go on", done=False)
    until(lambda: "1/0/1" in talk.engine.handles)
    assert talk.version_lock._evaluating == 1
    talk.engine.handles["1/0/1"].finish()
    until(lambda: talk.environments.turns[0] == 2)
    talk.environments.end(0)
    talk.wait_reports(1)
    assert talk.version_lock._evaluating == 0


def test_a_lease_that_is_taken_away_ends_its_dialogues_and_leaves_once(talk):
    talk.version_lock.confirm(4)
    talk.generation.reconcile([evaluation(1, version=4), train(2)], ())
    until(lambda: {"1", "2"} <= talk.engine.handles.keys())
    talk.generation.reconcile([], ())
    until(lambda: talk.version_lock._evaluating == 0)
    until(lambda: sorted(talk.environments.closed) == [0, 1, 2, 3])
    assert sorted(talk.engine.aborted) == ["1", "2"]
    for name in ("1", "2"):
        talk.engine.handles[name].finish(FinishReason.ABORTED)
    time.sleep(0.05)
    assert not talk.reports
    assert talk.version_lock._evaluating == 0
    assert talk.generation.num_active == 0


def test_rows_that_show_something_have_no_dialogues(talk):
    talk.generation.reconcile([train(1, row=14)], ())
    (report,) = talk.wait_reports(1)
    assert "the dialogues of this model are of text" in report.detail


def test_what_is_denoised_has_no_length_and_its_media_are_kept(rig):
    kept = []

    class Recorder:
        def keep(self, version, row, media):
            kept.append((version, row, media))
            return "media/step-1/row-4.png"

    media = Payload(kind="media", arrays={})
    encode = lambda prompt: Payload(kind="latents", arrays={})  # noqa: E731 - one word of a model's recipes
    parts = attrs.evolve(rig.generation._parts, media_writer=Recorder(), context_length=1)
    rig.generation._parts = attrs.evolve(parts, model=SimpleNamespace(encode=encode, decode=lambda payload: ""))
    rig.version_lock.confirm(1)
    rig.generation.reconcile([train(7), evaluation(8, version=1)], ())
    for name in ("7", "8"):
        handle = rig.engine.handles[name]
        made = Generated(
            payload=Payload(kind="latents", arrays={}),
            reason=FinishReason.STOP,
            oldest_version=1,
            newest_version=1,
            num_units=0,
            media=media,
        )
        scripted.Handle.finish(handle, [made] * handle.request.sampling.num_samples)
    reports = {report.lease: report for report in rig.wait_reports(2)}
    assert (reports[7].media, reports[8].media) == ("", "media/step-1/row-4.png")
    # It has no words of its own.
    assert reports[7].text == reports[8].text == rig.generation._parts.dataset.row("train", 4).words != ""
    assert kept == [(1, 4, media)]
