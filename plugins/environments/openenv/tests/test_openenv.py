import asyncio
import socket
import time
from collections import Counter

import pytest

from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.protocols import EnvironmentContext
from cosmos_core.types import Message, Prompt
from cosmos_environment_openenv.plugin import OpenEnvOptions, cosmos_environment

ROW = Prompt(text=(Message(role="user", content="Say it."),), reference="it", metadata={"task": {"id": 7}})
CONTEXT = EnvironmentContext(name="openenv", seed=0)


def made(create=None, **options):
    options = {"action": {"message": "{text}"}, "observation": "{observation.message} {observation.steps}", **options}
    create = create or cosmos_environment().create
    return create(structure(options, OpenEnvOptions), CONTEXT)


def play(*turns, seed=3, pause_s=0.0, **options):
    """The first words, and what became of each turn."""

    async def episode():
        environment, found = made(**options), []
        try:
            words = await environment.reset(ROW, seed)
            for turn in turns:
                await asyncio.sleep(pause_s)
                found.append(await environment.step(turn))
        finally:
            began = time.monotonic()
            await environment.close()
            assert time.monotonic() - began < 2.0
        return words, found

    return asyncio.run(episode())


def emptied(server, fault="sound"):
    until = time.monotonic() + 5
    while server.num_open[fault] and time.monotonic() < until:
        time.sleep(0.01)
    return not server.num_open[fault]


def test_a_turn_is_an_action_and_the_answer_is_an_observation_with_the_servers_reward(server):
    reset = {"task": "{metadata.task}", "id": "{metadata.task.id}", "told": "{prompt} {reference}, {metadata.task}"}
    words, turns = play("one", " two\n", "end", seed=(5 << 31) + 4, urls=[server.at()], reset=reset)
    assert words == "ready 4 0"
    assert [(turn.observation, turn.done, turn.reward) for turn in turns] == [
        ("one 1", False, 0.5),
        (" two\n 2", False, 0.5),
        ("end 3", True, 0.5),
    ]
    assert emptied(server)
    (heard,) = server.heard
    given = {"seed": 4, "task": {"id": 7}, "id": 7, "told": 'Say it. it, {"id": 7}'}
    assert heard[0] == {"type": "reset", "data": given}
    assert [each["data"] for each in heard[1:4]] == [{"message": text} for text in ("one", " two\n", "end")]
    assert heard[4:] == [{"type": "close"}]


def test_what_is_no_action_is_told_and_goes_on(server, subtests):
    action = {"message": "{number}"}
    for text, told in [
        ("", "there is no number in the last line"),
        ("3\nthree", "there is no number in the last line"),
        ("9" * 400, "the number is too large"),
        # The server has no numbers: it refuses what is one here.
        ("I take -3", "message: Input should be a valid string"),
        ("1e2", "message: Input should be a valid string"),
    ]:
        with subtests.test(text=text[:20]):
            _, (turn,) = play(text, urls=[server.at()], action=action, invalid_reward=-0.1)
            assert (turn.observation, turn.reward, turn.done) == (f"no action: {told}\n", -0.1, False)
            assert turn.detail == f"no action: {told}"
    sent = [message["data"] for heard in server.heard for message in heard if message["type"] == "step"]
    assert sent == [{"message": -3}, {"message": 100.0}]
    for text in [
        "no brace",
        "{",
        '{"a": NaN}',
        '{"a": [1e999]}',
        '{"a": ' * 5000,
        '{"a": ' + "1" * 5000 + "}",
        "{'a': 1}",
    ]:
        _, (turn,) = play(text, urls=[server.at()], action={})
        assert turn.observation == "no action: there is no JSON object\n"


def test_errors_of_the_environment_end_the_dialogue_unless_the_recipe_says_that_they_refuse(server):
    with pytest.raises(CosmosError, match=r"/sound/ws: EXECUTION_ERROR: it failed"):
        play("fail", urls=[server.at()])
    _, (refused, goes_on) = play("fail", "on", urls=[server.at()], refusals=["VALIDATION_ERROR", "EXECUTION_ERROR"])
    assert refused.observation == "no action: it failed\n"
    assert goes_on.observation == "on 2"
    with pytest.raises(
        CosmosError, match=r"environment\.options\.observation: no 'board' in observation, which has 'mess"
    ):
        play("one", urls=[server.at()], observation="{observation.board}")
    with pytest.raises(CosmosError, match=r"no 'steps' in observation\.message, which has 'ready 3'"):
        play("one", urls=[server.at()], observation="{observation.message.steps}")
    with pytest.raises(CosmosError, match=r"environment\.options\.reset: no 'level' in metadata, which has 'task'"):
        play(urls=[server.at()], reset={"level": "{metadata.level}"})
    assert play("one", urls=[server.at()], observation="{observation.more}!")[0] == "!"


def test_what_is_no_answer_of_a_server_says_so(server, subtests):
    no_answer = "/ws: no answer of an OpenEnv server: "
    for fault, why in [
        *((fault, no_answer) for fault in ("no-json", "deep", "a-list", "a-state", "no-data", "no-fields", "old")),
        *((fault, no_answer) for fault in ("reward-of-text", "no-finite-reward", "endless-reward", "done-in-words")),
        ("binary", no_answer),
        ("twice", no_answer + "it answers what it was not asked"),
        ("ended", "/ws: SESSION_ERROR: it cannot be serialized"),
        ("absent", no_answer + "HTTP 404 in place of a WebSocket; give the address"),
        ("page", no_answer + "HTTP 200 in place of a WebSocket"),
        ("status-500", "/ws: HTTP 500 in place of a WebSocket"),
        ("done-at-once", "the episode is over when it begins"),
        ("no-handshake", "/ws: no connection within 0.3 s"),
        ("hangs", "/ws: no answer to a step within 0.3 s; its episode is gone"),
        ("dies", "the server closed the connection .*; its episode is gone with it. If the same seed"),
    ]:
        with subtests.test(fault=fault), pytest.raises(CosmosError, match=why):
            play("one", "two", urls=[server.at(fault)], timeout_s=0.3, retries=1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(CosmosError, match=r"/ws: no connection: .*Connect"):
            play("one", urls=[url], retries=1)


def test_a_lost_episode_is_played_again_where_that_leads_to_the_same(server, subtests):
    for fault in ("dies-once", "hangs-once"):
        with subtests.test(fault=fault):
            server.forget()
            _, turns = play("one", "two", "three", urls=[server.at(fault)], deterministic=True, timeout_s=0.3)
            assert [turn.observation for turn in turns] == ["one 1", "two 2", "three 3"]
            first, second = server.heard
            assert [each["data"] for each in first[:3]] == [{"seed": 3}, {"message": "one"}, {"message": "two"}]
            assert second[:3] == first[:3]
    server.forget()
    assert play("one", urls=[server.at("dies-early")])[1][0].observation == "one 1"
    for fault, actions, deterministic in [("forgets", 1, True), ("another", 0, False)]:
        server.forget()
        why = f"the lost episode was played again, and the same seed and {actions} actions got other answers"
        with pytest.raises(CosmosError, match=why):
            play("one", "two", urls=[server.at(fault)], deterministic=deterministic)
    server.forget()
    with pytest.raises(CosmosError, match="the server closed the connection"):
        play("one", "two", urls=[server.at("dies")], deterministic=True, retries=2)
    assert len(server.heard) == 3
    assert emptied(server, "dies")


def test_another_server_takes_what_one_has_lost(server):
    server.forget()
    assert play(urls=[server.at("status-503-once")])[0] == "ready 3 0"
    urls = [server.at("status-500"), server.at("no-handshake"), server.at()]
    for _ in range(4):
        assert play("one", urls=urls, timeout_s=0.2)[1][0].observation == "one 1"


def test_a_full_server_is_asked_again(server):
    server.most_open = 1

    async def two():
        create = cosmos_environment().create
        first, second = (made(create, urls=[server.at()]) for _ in range(2))
        await first.reset(ROW, 1)
        late = asyncio.ensure_future(second.reset(ROW, 2))
        await asyncio.sleep(0.3)
        assert not late.done()
        await first.close()
        assert await late == "ready 2 0"
        third = made(create, urls=[server.at()], full_s=0.3)
        with pytest.raises(CosmosError, match=r"at capacity: 1 active\.; start it with more `max_concurrent_envs`"):
            await third.reset(ROW, 3)
        await third.close()
        await second.close()

    asyncio.run(two())
    assert emptied(server)


def test_episodes_are_spread_over_the_servers(server):
    async def many():
        create = cosmos_environment().create
        urls = [server.at(name) for name in "abc"]
        episodes = [made(create, urls=urls) for _ in range(9)]
        await asyncio.gather(*(each.reset(ROW, 0) for each in episodes))
        found = Counter(each._url for each in episodes)
        gone = [each for each in episodes if each._url == urls[1]]
        await asyncio.gather(*(each.close() for each in gone))
        late = [made(create, urls=urls) for _ in gone]
        await asyncio.gather(*(each.reset(ROW, 0) for each in late))
        assert {each._url for each in late} == {urls[1]}
        await asyncio.gather(*(each.close() for each in (*late, *episodes)))
        return found

    assert [*asyncio.run(many()).values()] == [3, 3, 3]


def test_a_dialogue_that_is_cancelled_while_it_hangs_up_leaves_nothing(server):
    async def cancelled():
        environment = made(urls=[server.at("hangs")])
        await environment.reset(ROW, 3)
        await environment.step("one")
        lost = asyncio.ensure_future(environment.step("two"))
        await asyncio.sleep(0.1)
        lost.cancel()
        await asyncio.wait({lost})
        session, closing = environment._connection._session, asyncio.ensure_future(environment.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
        closing.cancel()
        await asyncio.wait({closing})
        assert session.closed
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(cancelled())


def test_a_connection_outlives_a_long_turn_of_the_model(server):
    _, turns = play("one", "two", urls=[server.at("pings")], pause_s=0.8, retries=0)
    assert [turn.observation for turn in turns] == ["one 1", "two 2"]
    assert len(server.heard) == 1


def test_wrong_options_are_refused(subtests):
    for options, why in [
        ({"urls": []}, r"urls: there is no address"),
        ({"urls": ["localhost:8000"]}, r"urls: 'localhost:8000' is no address of a server, such as http"),
        ({"urls": ["http:///x"]}, r"urls: 'http:///x' is no address"),
        ({"action": {"message": "hello"}}, r"action: .* has nothing of the turn"),
        ({"action": "{text}"}, r"action: .*table"),
        (
            {"action": {"a": [{"b": "{txt}"}]}},
            r"action: nothing is called \{txt\} here; there are \{text\}, \{number\}",
        ),
        ({"observation": "{state.x}"}, r"observation: nothing is called \{state\} here"),
        ({"reset": {"task": "{row.id}"}}, r"reset: nothing is called \{row\} here; there are \{prompt\}"),
        ({"refusals": ["CAPACITY_REACHED"]}, r"refusals"),
        ({"retries": -1}, r"retries"),
        ({"timeout_s": 0.0}, r"timeout_s"),
        ({"url": "http://localhost"}, r"url: unknown .*did you mean urls"),
    ]:
        with subtests.test(options=options), pytest.raises(ConfigError, match=why):
            structure({"urls": ["http://localhost"], "action": {"message": "{text}"}, **options}, OpenEnvOptions)
