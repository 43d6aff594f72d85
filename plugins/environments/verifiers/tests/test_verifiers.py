"""An environment of verifiers' own API against the endpoint of a rollout replica with a scripted model."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from cosmos_core.errors import ConfigError, DataError, PluginError
from cosmos_core.protocols import DatasetContext, EnvironmentContext
from cosmos_core.rollout.endpoint.calls import CallError, Choice, Reply
from cosmos_core.rollout.endpoint.server import Endpoint
from cosmos_core.types import Message, Prompt, ToolCall
from cosmos_environment_verifiers.plugin import VerifiersAgent, VerifiersOptions
from cosmos_environment_verifiers.tasks import TasksOptions, VerifiersTasks

pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")  # of verifiers' mcp client


class Model:
    """Says 5, and 7 once it has been told that this is too low; refuses calls beyond a limit."""

    names = ("run",)
    asked = (("hints_hint", '{"of": "3"}'), ("hints_hint", "[]"), ("hints_hint", "no"), ("other", "{}"))

    def __init__(self, most, code):
        self.calls, self.most, self.code = [], most, code

    def call(self, session, call):
        assert session == "x"
        future = Future()
        if len(self.calls) == self.most:
            future.set_exception(CallError(400, "no more", code=self.code))
            return future
        self.calls.append([turn.content for turn in call.messages])
        said = Message(role="assistant", content="7" if self.calls[-1][-1] == "Too low." else "5")
        if call.tools and len(self.calls) <= len(self.asked):
            asked = ToolCall(
                name=self.asked[len(self.calls) - 1][0], arguments=self.asked[len(self.calls) - 1][1], id="c"
            )
            said = Message(role="assistant", content="", tool_calls=(asked,))
        choice = Choice(message=said, reason="tool_calls" if said.tool_calls else "stop", num_units=1)
        future.set_result(Reply(id=str(len(self.calls)), model="run", created=0, choices=(choice,), num_prompt_units=1))
        return future

    def refused(self):
        pass


def play(*tasks, most=9, code="max_turns", taskset=(), **env):
    """The rewards of tasks that are done at once, and the calls for them."""
    options = VerifiersOptions(env={"taskset": {"id": "vf_toy", **dict(taskset)}, **env})
    model = Model(most, code)
    endpoint = Endpoint(model, "127.0.0.1")
    endpoint.start()

    async def run(metadata):
        session = SimpleNamespace(base_url=f"{endpoint.url}/s/x/v1", model="run")
        agent = VerifiersAgent(options, EnvironmentContext(name="verifiers", seed=0))
        return await agent.run(session, Prompt(text="", metadata=metadata))

    async def all_of_them():
        return await asyncio.gather(*map(run, tasks))

    try:
        return asyncio.run(all_of_them()), model.calls
    finally:
        endpoint.close()


def test_an_episode_goes_on_from_its_own_turns_and_is_scored():
    rewards, calls = play({"task": 0})
    first = ["Be brief.", "Game 0: guess."]
    assert (rewards, calls) == ([2.0], [first, [*first, "5", "Too low."]])
    rewards, calls = play({"task": 1}, {"task": 0}, {"task": 1})
    assert (rewards, len(calls)) == ([2.0, 2.0, 2.0], 4)
    assert play({"task": 0}, id="single-agent") == ([0.0], [first])  # it asks once


def test_tools_of_a_task_are_called():
    rewards, calls = play({"task": 1}, taskset={"task": {"hints": True}}, id="single-agent")
    assert rewards == [2.0]
    wrong = ["no JSON object but []", "the arguments are no JSON: Exp", "there is no tool 'other', but hints_hint"]
    assert calls[-1][3] == "not 3"
    assert [said in told for said, told in zip(wrong, calls[-1][5::2], strict=True)] == [True] * 3


@pytest.mark.parametrize("code", ["max_turns", "context_length_exceeded"])
def test_an_episode_that_meets_a_limit_is_scored_as_far_as_it_went(code):
    assert play({"task": 0}, most=1, code=code)[0] == [0.0]
    assert play({"task": 0}, agent={"max_turns": 1})[0] == [0.0]
    with pytest.raises(PluginError, match=r"verifiers: the episode failed: .*400.*some_other"):
        play({"task": 0}, most=1, code="some_other")


def test_what_fails_or_is_not_scored_has_no_reward():
    names = {"names": ["raises", "slow", "7"]}
    with pytest.raises(PluginError, match=r"verifiers: the episode failed: EnvError: .*the game is lost"):
        play({"task": 0}, taskset=names)
    with pytest.raises(PluginError, match="verifiers: no score of found"):
        play({"task": 1}, taskset=names, agent={"timeout": {"scoring": 0.1}})
    with pytest.raises(PluginError, match=r"environment.options.env.agent: .* does not have 'agent' trained"):
        play({"task": 2}, taskset={**names, "trained": False})


def test_rows_name_tasks():
    for metadata, words in [
        ({}, "the row's metadata has the task None"),
        ({"task": True}, "has the task True"),
        ({"task": 2}, "the row names task 2 of a taskset that has 2"),
        ({"task": 1, "key": "0"}, "task 1 is another than that of the row"),
    ]:
        with pytest.raises(DataError, match=words):
            play(metadata)
    for _ in range(2):
        with pytest.raises(DataError, match="verifiers: task 1 cannot be loaded: OSError"):
            play({"task": 0}, {"task": 1}, taskset={"names": ["7", "broken"]})


def test_options_are_refused():
    context = EnvironmentContext(name="verifiers", seed=0)
    for env, words in [
        ({}, "cannot make {}: .* needs a seed taskset"),
        ({}, "cannot make {}: .* needs a seed taskset"),
        ({"taskset": {"id": "nowhere"}}, r"environment.options.env: verifiers cannot make .*'nowhere' not found"),
        ({"taskset": {"id": "vf_toy", "size": 3}}, "cannot make .*size"),
        ({"taskset": {"id": "vf_toy"}, "agent": {"turns": 3}}, "cannot make .*turns"),
        ({"taskset": {"id": "vf_toy"}, "agent": {"harness": {"id": "nothing"}}}, "cannot make .*nothing"),
    ]:
        with pytest.raises(ConfigError, match=f"(?s){words}"):
            VerifiersAgent(VerifiersOptions(env=env), context)
    for taskset, words in [
        ({"id": "vf_toy", "endless": True}, r"dataset.options.rows: the taskset has no end"),
        ({"id": "nowhere"}, r"dataset.options.taskset: verifiers cannot make .*'nowhere' not found"),
    ]:
        with pytest.raises(ConfigError, match=words):
            VerifiersTasks(TasksOptions(taskset=taskset), DatasetContext(seed=0, directory=Path()))


def test_the_rows_of_the_dataset_are_the_tasks_of_the_environment():
    taskset = {"id": "vf_toy", "names": [*"123456789"]}
    made = VerifiersTasks(TasksOptions(taskset=taskset, heldout_share=0.5), DatasetContext(seed=0, directory=Path()))
    rows = [made.row(split, index) for split in ("train", "heldout") for index in range(made.size(split))]
    assert {row.metadata["task"] for row in rows} == {*range(9)}
    assert made.size("heldout") not in (0, 9)
    assert all(row.words == f"system: Be brief.\nuser: Game {row.metadata['task']}: guess." for row in rows)
    chosen = next(row.metadata for row in rows if row.metadata["task"] == 6)
    assert play(chosen, taskset=taskset)[0] == [2.0]
    # What is the same task again is in the same split.
    endless = TasksOptions(taskset={**taskset, "endless": True}, rows=18, heldout_share=0.5)
    again = VerifiersTasks(endless, DatasetContext(seed=0, directory=Path()))
    train = sorted(again.row("train", index).metadata["task"] for index in range(again.size("train")))
    half = [number for number in train if number < 9]
    assert train == [*half, *(number + 9 for number in half)]
    assert 0 < len(half) < 9
