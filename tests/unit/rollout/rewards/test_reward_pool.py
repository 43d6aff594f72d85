from __future__ import annotations

import os
import re
import signal
import time

import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import CosmosError, PluginError
from cosmos_core.protocols import Completion
from cosmos_core.rollout.rewards.messages import Setup
from cosmos_core.rollout.rewards.pool import MOST_LATE
from cosmos_core.rollout.rewards.worker import load
from cosmos_core.transport.reports import Troubled
from cosmos_core.types import Array, Message, Payload, Prompt, SampleStatus

NAMES = ("cannot read", "lost")
OK, FAILED, LATE = SampleStatus.OK, SampleStatus.REWARD_FAILED, SampleStatus.REWARD_TIMEOUT


def test_scores_come_back_in_order_without_torch(shared):
    pool = shared
    values = [outcome.value for outcome in pool.score(*(f"number {n}" for n in range(100)))]
    assert values == [float(n) for n in range(100)]
    (scored,) = pool.score("score 2.5")
    assert (scored.value, scored.detail) == (2.5, 'a: 1, b: [0.3333, {"c": -12345.7}, 6.667e-08]')
    assert pool.score("surrogate")[0].detail == 'a: "?"'
    assert pool.value("torch") == 0.0
    assert pool.pool.scoring_s > 0
    assert pool.value("loaded") > 0
    (unsent,) = pool.score("number 1", prompt=Prompt(text="p", reference=2**70))
    assert unsent.status is FAILED
    assert "cannot be sent" in unsent.detail


def test_a_reward_sees_the_prompt_and_payload(shared):
    pool = shared
    prompt = Prompt(text=(Message(role="user", content="abc"),), reference={"answer": 4})
    assert pool.value("prompt", prompt=prompt) == 7.0
    assert pool.value("units", num_units=5) == 5.0
    array = Array(dtype="uint8", shape=(3,), data=memoryview(bytes([1, 2, 4])))
    assert pool.value("payload", payload=Payload(kind="media", arrays={"x": array})) == 7.0


def test_a_failure_is_a_status_of_that_completion_alone(shared):
    for text, detail in [
        ("raise rats", "ValueError: cannot read rats"),
        ("number nan", "the score is not finite: nan"),
        ("number -inf", "the score is not finite: -inf"),
        ("text high", "the score is no number but 'high'"),
        ("none", "the score is no number but None"),
        ("async-raise", "KeyError: 'lost'"),
        ("huge", "OverflowError: int too large"),
        ("async-huge", "OverflowError: int too large"),
        ("circular", "ValueError: Circular reference detected"),
        ("stop", "StopIteration"),
        ("exit", r"the reward's process ended \(exit code 3\)"),
        ("segfault", r"the reward's process ended \(signal SIGSEGV\)"),
        ("garble", r"the reward's process ended \(it sent what cannot be read: a frame of 4294967295 bytes"),
    ]:
        found = shared.score("number 1", text, "number 2", "async 0.01", "number 3")
        assert [outcome.status for outcome in found] == [OK, FAILED, OK, OK, OK]
        assert [outcome.value for outcome in found] == [1.0, None, 2.0, 0.01, 3.0]
        assert re.search(detail, found[1].detail)


def test_workers_that_end_are_told_and_logged_ever_less_often(scorer, caplog):
    pool, told = scorer(), []
    pool.pool.tell = told.append
    found = pool.score(*["exit"] * 3)
    assert [outcome.status for outcome in found] == [FAILED] * 3
    # All that it had are tried again, each alone, as a worker may die of something else.
    whose = "processes of reward obedient that ended"
    assert told == [Troubled(what=whose, number=1, last="exit code 3 (a sample is tried twice)")] * 4
    assert found[0].detail == "the reward's process ended (exit code 3): 'exit' of the prompt 'p'"
    assert pool.score("number 1")[0].value == 1.0
    os.kill(int(pool.value("pid")), signal.SIGKILL)
    until = time.monotonic() + 5
    while len(told) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert told[4:] == [Troubled(what="idle processes of rewards that ended", number=1, last="signal SIGKILL")]
    counted = [text for text in caplog.messages if "ended: " in text]
    assert counted == [
        *(f"processes of reward obedient ended: exit code 3 ({number} so far)" for number in (1, 2, 4)),
        "idle processes of rewards ended: signal SIGKILL (1 so far)",
    ]
    # Which of several it died of is found at the second death, whatever it had not told of them.
    assert [outcome.status for outcome in pool.score(*["number 1"] * 7, "exit")] == [OK] * 7 + [FAILED]
    assert len(told) == 7
    # One that sent what cannot be read was ended by the replica, and it is said why.
    assert pool.score("garble")[0].status is FAILED
    assert told[-1].last.startswith("it sent what cannot be read: a frame of")
    # One that is late was ended by the replica: its sample says so.
    late, told = scorer(timeout_s=0.3), []
    late.pool.tell = told.append
    assert late.score("hang")[0].status is LATE
    assert told == []
    assert late.pool.scoring_s >= 0.3


def test_a_hang_is_a_timeout_of_that_completion_alone(scorer):
    for text in ["hang", "async-hang"]:
        pool = scorer(timeout_s=1.5)
        found = pool.score("number 1", "async 0.1", text, "number 2", "async 0.05", "number 3")
        assert [outcome.status for outcome in found] == [OK, OK, LATE, OK, OK, OK]
        assert found[2].detail == f"no score within 1.5 s (reward.0.timeout_s): {text!r} of the prompt 'p'"


@pytest.mark.parametrize(("held_s", "status", "ends"), [(30.0, LATE, 0), (1.0, FAILED, 2)])
def test_what_has_not_begun_while_a_coroutine_holds_up_its_worker_is_not_late(scorer, held_s, status, ends):
    configs = [RewardConfig(plugin="obedient", name=name, timeout_s=limit) for name, limit in (("a", 1.0), ("b", 0.5))]
    held, told = scorer(rewards=configs), []
    held.pool.tell = told.append
    held.score("number 1")
    first = held.submit(f"hold {held_s}")
    time.sleep(0.3)
    assert [each.status for row in held.score(*["number 1"] * 4) for each in row] == [OK] * 8
    assert [each.status for each in first()[0]] == [status, OK]
    assert [each.what for each in told] == ["processes of reward a that ended"] * ends
    # That of one worker, who was at one thing at a time: eight tasks waited.
    assert held.pool.num_replaced == max(1, ends)
    assert held.pool.scoring_s < 4.5


def test_one_that_lets_no_other_thread_run_costs_its_time_limit_once(scorer):
    busy = scorer(timeout_s=1.0)
    found = busy.score(*["number 1"] * 4, "busy", *["number 2"] * 3)
    assert [outcome.status for outcome in found] == [OK] * 4 + [LATE] + [OK] * 3
    assert busy.pool.num_replaced == 1


def test_where_a_reward_raises_is_told_and_logged_once_a_place(scorer, plugin, caplog):
    pool = scorer(num_workers=2)
    found = pool.score("raise rats", "raise mice", "async-raise", "circular", "none")
    source = (plugin / "obedient_plugin.py").read_text().splitlines()
    lines = {name: number for number, line in enumerate(source, 1) for name in NAMES if name in line}
    assert found[0].detail == f"ValueError: cannot read rats (obedient_plugin.py:{lines['cannot read']})"
    assert found[2].detail == f"KeyError: 'lost' (obedient_plugin.py:{lines['lost']})"
    # What is no error of the reward's has no place.
    assert found[4].detail == "the score is no number but None"
    told = [record.message for record in caplog.records if " raised at " in record.message]
    assert [each.splitlines()[0] for each in told if "obedient_plugin" in each] == [
        f"reward obedient raised at obedient_plugin.py:{lines[name]}:" for name in NAMES
    ]
    assert 'raise ValueError("cannot read " + rest)' in told[0]


def test_a_reward_that_answers_nothing_is_given_up(scorer):
    began = time.monotonic()
    with pytest.raises(
        PluginError, match=r"reward obedient: the last \d scores were not there within 0\.3 s: it hangs"
    ):
        scorer(timeout_s=0.3).score(*["hang"] * 9)
    assert time.monotonic() - began > MOST_LATE * 0.3
    # A service goes on: strangers choose what is scored.
    late = scorer(timeout_s=0.3, lasts=True).score(*["hang"] * 7)
    assert {outcome.status for outcome in late} == {LATE}
    # Many that are late at once are not late again and again;
    scorer(timeout_s=1.0).score(*["async-hang"] * 9)
    # and whoever answers in between is only slow.
    found = scorer(timeout_s=0.3).score(*["hang", "hang", "number 1"] * 3)
    assert [outcome.status for outcome in found] == [LATE, LATE, OK] * 3


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


def test_several_rewards_each_with_its_options(scorer):
    configs = [RewardConfig(plugin="obedient"), RewardConfig(plugin="obedient", options={"scale": -2.0})]
    found = scorer(rewards=configs).score("number 3", "number 4")
    assert [[outcome.value for outcome in row] for row in found] == [[3.0, -6.0], [4.0, -8.0]]


def test_a_worker_killed_from_outside_is_replaced_and_nobody_blamed(shared):
    for _ in range(2):
        killed = int(shared.value("pid"))
        os.kill(killed, signal.SIGKILL)
        found = shared.score(*["number 5"] * 20)
        assert {outcome.value for outcome in found} == {5.0}
        assert int(shared.value("pid")) != killed


def test_rewards_that_cannot_be_loaded_are_told(scorer, plugin, monkeypatch):
    with pytest.raises(PluginError, match="obedient"):
        scorer(rewards=[RewardConfig(plugin="obedien")]).score("number 1")
    monkeypatch.syspath_prepend(str(plugin))
    for options, message in (
        ({"scal": 1.0}, r"reward\.0\.options\.scal.*scale"),
        ({"scale": 13.0}, "reward mine could not load: OSError: no s"),
        ({"scale": 14.0}, "^reward mine: no key$"),
        ({"scale": 15.0}, "^reward mine: no key$"),
        ({"scale": 16.0}, "^reward mine: reward minerals: no key$"),
    ):
        setup = RewardConfig(plugin="obedient", name="mine", options=options, timeout_s=1.0)
        with pytest.raises(CosmosError, match=message):
            load(Setup(rewards=(setup,), seed=0))


def test_blame_is_logged_by_the_name_that_the_recipe_gives(scorer, caplog):
    configs = [RewardConfig(plugin="obedient", name="strict", timeout_s=0.2)]
    (found,) = scorer(rewards=configs).score("hang")
    assert f"reward strict: {found.detail} (1 so far)" in caplog.messages
