from __future__ import annotations

import sys

import attrs
import numpy as np
import pytest

from cosmos_core.config.schema import EnvironmentConfig, RewardConfig
from cosmos_core.models.tokens import array_of, token_array, values
from cosmos_core.protocols import FinishReason, Generated
from cosmos_core.rollout.episodes.dialogue import EpisodeResult
from cosmos_core.rollout.rewards import scoring
from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_core.transport.reports import REPORT
from cosmos_core.types import Array, Payload, Prompt, SampleStatus

OK, FAILED, LATE = SampleStatus.OK, SampleStatus.REWARD_FAILED, SampleStatus.REWARD_TIMEOUT
REWARDS = [RewardConfig(plugin="math", weight=2.0), RewardConfig(plugin="style", weight=-0.5)]


def played(reason=FinishReason.STOP, kind="tokens") -> EpisodeResult:
    arrays = {"prompt": Array(dtype="int32", shape=(3,), data=bytes(12))}
    payload = Payload(kind=kind, arrays=arrays)
    made = Generated(payload=payload, reason=reason, oldest_version=2, newest_version=5, num_units=7)
    return EpisodeResult.single(made)


def test_the_reward_is_the_weighted_sum_and_each_is_kept():
    outcomes = [Outcome(value=1.0, status=OK), Outcome(value=0.5, status=OK)]
    made = scoring.sample(3, played(), outcomes, REWARDS)
    assert made.reward == 2.0 - 0.25
    assert made.rewards == {"math": 1.0, "style": 0.5}
    assert (made.index, made.status, made.detail) == (3, OK, "")
    assert (made.oldest_version, made.newest_version, made.num_units, made.num_prompt_units) == (2, 5, 7, 3)
    assert made.is_scored


GATED = [
    RewardConfig(plugin="format", weight=0.5, gate=1.0),
    RewardConfig(plugin="math", weight=2.0),
    RewardConfig(plugin="length", name="brief", weight=-1.0, gate=0.25),
]


def test_below_a_gate_the_gates_alone_count_and_each_is_reported():
    for scores, reward, told in [
        ((1.0, 1.0, 0.5), 0.5 + 2.0 - 0.5, ""),
        ((1.0, 1.0, 0.25), 0.5 + 2.0 - 0.25, ""),
        ((0.0, 1.0, 0.5), -0.5, "format: below the gate, the rewards without one do not count"),
        ((0.9, 1.0, 0.0), 0.45, "format, brief: below the gate, the rewards without one do not count"),
    ]:
        made = scoring.sample(0, played(), [Outcome(value=value, status=OK) for value in scores], GATED)
        assert made.reward == pytest.approx(reward)
        assert made.rewards == dict(zip(("format", "math", "brief"), scores, strict=True))
        assert (made.status, made.detail) == (OK, told)


def test_below_a_gate_an_environments_reward_does_not_count_either():
    paid = attrs.evolve(played(), reward=3.0)
    environment = EnvironmentConfig(plugin="calculator", weight=1.0)
    turns = {"turns": token_array([2, 5]), "turn_rewards": array_of(np.float64([3.0, 0.0]))}
    payload = attrs.evolve(paid.generated.payload, arrays=turns)
    paid = attrs.evolve(paid, generated=attrs.evolve(paid.generated, payload=payload))
    for value, reward, of_turns in ((1.0, 3.5, [3.0, 0.0]), (0.0, 0.0, [0.0, 0.0])):
        outcomes = [Outcome(value=value, status=OK)]
        made = scoring.sample(0, paid, outcomes, GATED[:1], environment)
        assert made.reward == reward
        assert made.rewards["calculator"] == 3.0
        assert values(scoring.trained(paid, outcomes, GATED[:1]), "turn_rewards").tolist() == of_turns


def test_a_failed_reward_leaves_the_sample_without_one_below_a_gate_too():
    outcomes = [Outcome(value=0.0, status=OK), Outcome(value=None, status=LATE), Outcome(value=1.0, status=OK)]
    made = scoring.sample(0, played(), outcomes, GATED)
    assert (made.reward, made.status) == (None, LATE)


def test_a_truncated_sample_is_scored_and_says_so():
    outcomes = [Outcome(value=1.0, status=OK)] * 2
    made = scoring.sample(0, played(FinishReason.LENGTH), outcomes, REWARDS)
    assert made.status is SampleStatus.TRUNCATED
    assert made.is_scored


def test_what_rewards_say_of_their_scores_is_kept_where_the_text_is():
    outcomes = [Outcome(value=1.0, status=OK, detail="steps: 2"), Outcome(value=0.0, status=OK, detail='tone: "dry"')]
    made = scoring.sample(0, played(), outcomes, REWARDS)
    assert made.detail == 'math: steps: 2; style: tone: "dry"'
    made = [made, attrs.evolve(made, index=1), attrs.evolve(made, index=2, status=FAILED, reward=None)]
    assert [bool(each.detail) for each in scoring.report(1, made, "text").samples] == [True, False, True]
    assert scoring.sample(0, played(), outcomes[:1], REWARDS[:1]).detail == "steps: 2"


def test_any_failed_reward_leaves_the_sample_without_one():
    for status in [FAILED, LATE]:
        outcomes = [Outcome(value=1.0, status=OK), Outcome(value=None, status=status, detail="why")]
        made = scoring.sample(0, played(FinishReason.LENGTH), outcomes, REWARDS)
        assert (made.reward, made.status, made.detail) == (None, status, "style: why")
        assert made.rewards == {"math": 1.0}
        assert not made.is_scored


def test_a_failure_names_its_reward_once():
    for said in ("PluginError: reward math: no answer", "PluginError: no answer"):
        made = scoring.sample(0, played(), [Outcome(value=None, status=FAILED, detail=said)], REWARDS[:1])
        assert made.detail == "math: PluginError: no answer"


def test_a_sum_that_is_not_finite_is_no_reward():
    most = sys.float_info.max
    for value in (most, -most):
        made = scoring.sample(0, played(), [Outcome(value=value, status=OK), Outcome(value=1.0, status=OK)], REWARDS)
        assert (made.reward, made.status) == (None, FAILED)
        assert made.detail == f"the weighted sum of its rewards is not finite: math {value:g}, style 1"
        assert REPORT.decode(REPORT.encode(scoring.report(1, [made], "text"))).samples == (made,)
    paid = attrs.evolve(played(), reward=most)
    environment = EnvironmentConfig(plugin="calculator", weight=1.0)
    made = scoring.sample(0, paid, [Outcome(value=most, status=OK)], GATED[:1], environment)
    assert (made.reward, made.status) == (None, FAILED)


def test_the_report_has_the_samples_and_a_cut_text():
    made = scoring.sample(0, played(), [Outcome(value=1.0, status=OK)] * 2, REWARDS)
    report = scoring.report(1, [made], "x" * 5000)
    assert len(report.text) == 2000
    assert report.samples == (made,)
    assert {name: getattr(made, name) for name in ("index", "reward", "num_units", "num_prompt_units")} == {
        "index": 0,
        "reward": 1.5,
        "num_units": 7,
        "num_prompt_units": 3,
    }


def test_rewards_see_a_denoised_sample_and_how_it_looks_and_neither_the_way_there_nor_what_conditioned_it():
    way, conditioning = ("states", "places", "steps", "offsets"), ("text", "given", "is_given", "condition", "image")
    arrays = dict.fromkeys(("sample", "times", *way, *conditioning), Array(dtype="int32", shape=(1,), data=bytes(4)))
    media = Payload(kind="media", arrays={"frames": Array(dtype="uint8", shape=(1, 1, 1, 3), data=bytes(3))})
    made = Generated(
        payload=Payload(kind="latents", arrays=arrays),
        reason=FinishReason.STOP,
        oldest_version=0,
        newest_version=0,
        num_units=0,
        media=media,
    )
    seen = scoring.to_score(Prompt(text="p"), EpisodeResult.single(made), "")
    assert seen.payload.arrays.keys() == {"sample", "times"}
    assert seen.media is media
    assert not seen.truncated


def test_text_rewards_see_no_tokens_but_media_is_passed():
    seen = scoring.to_score(Prompt(text="p"), played(), "t")
    assert (seen.payload, seen.num_units) == (None, 7)
    made = scoring.to_score(Prompt(text="p"), played(FinishReason.LENGTH, kind="media"), "")
    assert made.payload is not None
    assert made.truncated
