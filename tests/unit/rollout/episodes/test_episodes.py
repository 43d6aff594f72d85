"""Dialogues with a scripted engine and scripted environments: every way in which one can go on or end."""

from __future__ import annotations

import collections
import functools

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.errors import DataError, EngineError
from cosmos_core.models.tokens import decided, tokens_payload, values
from cosmos_core.protocols import EnvironmentCapabilities, Request, Sampling
from cosmos_core.rollout.episodes.episode import Episodes
from cosmos_core.rollout.episodes.messages import Answered, Failed, Opened
from cosmos_core.types import Message, Prompt, SampleStatus
from tests.scripted import Handle, generated

STOP = 9


class Engine:
    """Answers each request with the next scripted turns."""

    def __init__(self):
        self.turns, self.requests, self.aborted = collections.deque(), [], []

    def submit(self, requests):
        if any(each.prompt.arrays["prompt"].shape == (13,) for each in requests):
            raise EngineError("no room for 13 units")
        self.requests += requests
        return [Handle(each, [self.made(each) for _ in range(each.sampling.num_samples)]) for each in requests]

    def made(self, request):
        ids, version = (*self.turns.popleft(), 3)[:2] if self.turns else ([5, STOP], 3)
        return generated(request, ids, is_whole=ids[-1] == STOP, version=version, number=len(self.requests))

    def abort(self, names):
        self.aborted += names


class Pool:
    """Environments that answer what a script says, at once or when they are told to."""

    def __init__(self, opens=(), script=None):
        self.opens, self.script, self.closed = list(opens), script or (lambda turn, text: {"done": True}), []
        self.turns, self.seeds, self.asked, self.holds = collections.Counter(), [], [], False

    def open(self, prompt, seed, answer):
        episode = len(self.seeds)
        self.seeds.append(seed)
        words = self.opens[episode] if episode < len(self.opens) else None
        failed = Failed(episode=episode, timed_out=words == "late", detail="no task")
        said = None if words is None else Message(role="user", content=words)
        answer(failed if words in ("late", "bad") else Opened(episode=episode, words=said))
        return episode

    def act(self, episode, text, answer):
        self.turns[episode] += 1
        reply = self.script(self.turns[episode], text)
        fields = {"observation": None, "role": "user", "done": False, "reward": 0.0, "detail": "", **(reply or {})}
        made = (
            Failed(episode=episode, timed_out=True, detail="slow")
            if reply is None
            else Answered(episode=episode, **fields)
        )
        if self.holds:
            self.asked.append(functools.partial(answer, made))
        else:
            answer(made)

    def forget(self, episode):
        self.closed.append(episode)


class Model:
    """A letter is a token."""

    def __init__(self):
        self.roles = []

    def encode(self, prompt):
        text = prompt.text if isinstance(prompt.text, str) else "".join(each.content for each in prompt.text)
        if "?" in text:
            raise DataError("no such letter")
        return tokens_payload([ord(letter) for letter in text])

    def decode(self, payload):
        return " ".join(str(token) for token in values(payload, "completion").tolist() if token != STOP)

    def encode_turns(self, prompt, written, turns):
        (said,) = turns
        if said.content == "?":
            raise DataError("no such letter")
        self.roles.append(said.role)
        return [ord(letter) for letter in said.content]

    def read_turn(self, prompt, ids):
        raise AssertionError("environments are given text")


class Rig:
    def __init__(self, pool=None, *, max_turns=4, rewards=True):
        self.engine, self.pool, self.events, self.played = Engine(), pool or Pool(), collections.deque(), None
        self.model = Model()
        self.episodes = Episodes(
            environment=EnvironmentConfig(plugin="game", max_turns=max_turns, weight=2.0),
            capabilities=EnvironmentCapabilities(rewards=rewards),
            model=self.model,
            engine=self.engine,
            pool=self.pool,
            version=lambda: 8,
            post=self.events.append,
        )

    def begin(self, prompt="ab", *, samples=1, max_units=20, longest=50):
        prompt = prompt if isinstance(prompt, Prompt) else Prompt(text=prompt)
        request = Request(
            request_id="4",
            prompt=Model().encode(prompt),
            sampling=Sampling(max_units=max_units, num_samples=samples),
            seed=77,
        )
        self.episodes.begin(request, prompt, longest=longest, done=self.finish)
        self.drain()
        return self

    def finish(self, played):
        assert self.played is None
        self.played = played

    def drain(self):
        while self.events:
            self.events.popleft()()


def say(*words):
    """An environment that says these, then ends."""
    return lambda turn, text: {"observation": words[turn - 1]} if turn <= len(words) else {"done": True}


def test_a_dialogue_is_one_sequence_whose_prompts_are_all_that_came_before():
    rig = Rig(Pool(script=say("xy", "z")))
    rig.engine.turns += [([1, 2, STOP], 3), ([4, STOP], 5), ([6, STOP], 5)]
    (played,) = rig.begin().played
    payload = played.generated.payload
    assert values(payload, "prompt").tolist() == [97, 98]
    assert values(payload, "completion").tolist() == [1, 2, STOP, 120, 121, 4, STOP, 122, 6, STOP]
    assert decided(payload).tolist() == [True, True, True, False, False, True, True, False, True, True]
    assert values(payload, "logprobs").tolist() == [-1, -2, -STOP, -4, -STOP, -6, -STOP]
    assert values(payload, "versions").tolist() == [3, 3, 3, 5, 5, 5, 5]
    # Each unit but the last has the record of its first forward: that of the turn which went on from it.
    assert values(payload, "routing").tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert (played.generated.oldest_version, played.generated.newest_version, played.generated.num_units) == (3, 5, 7)
    prompts = [values(each.prompt, "prompt").tolist() for each in rig.engine.requests]
    assert prompts == [[97, 98], [97, 98, 1, 2, STOP, 120, 121], [97, 98, 1, 2, STOP, 120, 121, 4, STOP, 122]]
    assert [each.sampling.max_units for each in rig.engine.requests] == [20, 17, 15]
    assert rig.pool.closed == [0]
    assert played.status is SampleStatus.OK


def test_samples_that_begin_alike_share_their_first_request_and_part_ways_after_it():
    rig = Rig(Pool(opens=["c", "c", "c"], script=say("x"))).begin(samples=3)
    first, *later = rig.engine.requests
    assert (first.request_id, first.sampling.num_samples, first.seed) == ("4", 3, 77)
    assert values(first.prompt, "prompt").tolist() == [97, 98, 99]
    assert [(each.request_id, each.sampling.num_samples) for each in later] == [
        ("4/0/1", 1),
        ("4/1/1", 1),
        ("4/2/1", 1),
    ]
    assert len({first.seed, *(each.seed for each in later)}) == 4
    assert rig.pool.seeds == [77] * 3
    assert len(rig.played) == 3


def test_samples_that_begin_otherwise_are_asked_alone():
    rig = Rig(Pool(opens=["c", None])).begin(samples=2)
    assert [values(each.prompt, "prompt").tolist() for each in rig.engine.requests] == [[97, 98, 99], [97, 98]]
    assert [each.request_id for each in rig.engine.requests] == ["4/0/0", "4/1/0"]
    assert [values(each.generated.payload, "prompt").tolist() for each in rig.played] == [[97, 98, 99], [97, 98]]


def test_first_words_are_a_turn_of_the_user_in_a_chat():
    rig = Rig(Pool(opens=["c"])).begin(Prompt(text=(Message(role="system", content="ab"),)))
    assert values(rig.engine.requests[0].prompt, "prompt").tolist() == [97, 98, 99]


def test_who_said_what_is_told_apart():
    script = [{"observation": "x", "role": "tool"}, {"observation": "y"}, {"done": True, "observation": "unseen"}]
    rig = Rig(Pool(opens=["c"], script=lambda turn, text: script[turn - 1]))
    rig.engine.turns += [([1, 2, STOP],), ([3, STOP],), ([4, STOP],)]
    (played,) = rig.begin().played
    assert [(each.role, each.content) for each in played.said] == [
        *(("user", "c"), ("assistant", "1 2"), ("tool", "x"), ("assistant", "3"), ("user", "y"), ("assistant", "4")),
    ]
    assert rig.model.roles == ["user", "tool", "user"]


def test_what_was_lost_with_others_is_told_apart():
    lost = Failed(episode=0, timed_out=False, detail="lost with its process", is_lost=True)
    rig = Rig(Pool(script=say("x")))
    rig.pool.act = lambda episode, text, answer: answer(lost)
    (played,) = rig.begin().played
    assert (played.status, played.detail) == (SampleStatus.ENVIRONMENT_LOST, "game: lost with its process")
    assert not played.status.is_scored


def test_rewards_and_details_add_up():
    script = [{"observation": "x", "reward": 0.5, "detail": "good"}, {"done": True, "reward": -2.0, "detail": "bad"}]
    (played,) = Rig(Pool(script=lambda turn, text: script[turn - 1])).begin().played
    assert (played.reward, played.detail) == (-1.5, "game: good; bad")
    payload = played.generated.payload
    assert values(payload, "turn_rewards").tolist() == [1.0, -4.0]
    assert sum(values(payload, "turns")) == played.generated.num_units
    (silent,) = Rig(Pool(script=lambda turn, text: script[turn - 1]), rewards=False).begin().played
    assert silent.reward is None


def test_the_environment_reads_the_text_of_the_turn_alone():
    heard = []
    rig = Rig(Pool(script=lambda turn, text: heard.append(text) or say("x")(turn, text)))
    rig.engine.turns += [([1, 2, STOP],), ([3, STOP],)]
    rig.begin()
    assert heard == ["1 2", "3"]


def test_what_ends_before_it_is_done_is_truncated():
    for setting, script, turns, detail in [
        ({"max_turns": 2}, say("x", "x", "x"), [], "game: not done after 2 turns"),
        (
            {"max_units": 2},
            say("x"),
            [([1, 2],)],
            "game: a turn was cut: the model's own units, 2, are all of the 2 (max_units) that all its turns may have",
        ),
        (
            {"longest": 4},
            say("x"),
            [([1, 2],)],
            "game: a turn was cut: prompt, turns and observations, 4 units, may have 4 together",
        ),
        (
            {"max_units": 2},
            say("x"),
            [],
            "game: no room for an observation of 1 units and a turn: the model's own units, 2, are all of the 2",
        ),
        (
            {"longest": 24},
            say("x" * 20),
            [],
            "game: no room for an observation of 20 units and a turn: prompt, turns and observations, 4 units, may",
        ),
    ]:
        rig = Rig(Pool(script=script), max_turns=setting.pop("max_turns", 4))
        rig.engine.turns += turns
        (played,) = rig.begin(**setting).played
        assert played.status is SampleStatus.TRUNCATED
        assert played.detail.startswith(detail)
        assert decided(played.generated.payload)[-1]
        assert rig.pool.closed == [0]


def test_an_observation_that_just_fits_is_shown():
    rig = Rig(Pool(script=say("x" * 20))).begin(longest=25)
    assert rig.engine.requests[-1].sampling.max_units == 1


def test_what_fails_says_why_and_keeps_what_was_generated():
    for pool, status, detail, num_units in [
        (Pool(opens=["bad"]), SampleStatus.ENVIRONMENT_FAILED, "game: no task", 0),
        (Pool(opens=["late"]), SampleStatus.ENVIRONMENT_TIMEOUT, "game: no task", 0),
        (Pool(opens=["?"]), SampleStatus.ENVIRONMENT_FAILED, "game: the environment's first words cannot be", 0),
        (Pool(opens=["x" * 48]), SampleStatus.ENVIRONMENT_FAILED, "game: the environment's first words make", 0),
        (Pool(script=lambda turn, text: None), SampleStatus.ENVIRONMENT_TIMEOUT, "game: slow", 2),
        (Pool(script=say("?")), SampleStatus.ENVIRONMENT_FAILED, "game: the observation cannot be encoded", 2),
        (Pool(opens=["x" * 11]), SampleStatus.ENVIRONMENT_FAILED, "game: a turn cannot be generated: no room for", 0),
        (Pool(script=say("x" * 9)), SampleStatus.ENVIRONMENT_FAILED, "game: a turn cannot be generated: no room", 2),
    ]:
        (played,) = Rig(pool).begin().played
        assert played.status is status
        assert played.detail.startswith(detail)
        assert played.generated.num_units == num_units
        assert played.generated.oldest_version == (3 if num_units else 8)
        assert pool.closed == [0]


def test_one_failure_leaves_the_others_of_the_group_alone():
    rig = Rig(Pool(opens=[None, "bad", None])).begin(samples=3)
    assert [each.status for each in rig.played] == ["ok", "environment_failed", "ok"]
    assert len(rig.engine.requests) == 2


def test_a_request_that_is_abandoned_is_aborted_closed_and_never_told():
    rig = Rig(Pool(script=say("x")))
    rig.pool.holds = True
    rig.begin(samples=2)
    rig.pool.asked.pop()()
    rig.drain()
    assert rig.episodes.abandon("4")
    assert not rig.episodes.abandon("4")
    assert sorted(rig.engine.aborted) == ["4", "4/1/1"]
    assert sorted(rig.pool.closed) == [0, 1]
    for answer in rig.pool.asked:
        answer()
    rig.drain()
    assert rig.played is None
