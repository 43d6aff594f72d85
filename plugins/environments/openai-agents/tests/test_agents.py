"""The calculator of the SDK, as its program has it, against the endpoint of a rollout replica with a scripted model."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from types import SimpleNamespace

import openai
import pytest

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import EnvironmentContext
from cosmos_core.rollout.endpoint.calls import Choice, Reply
from cosmos_core.rollout.endpoint.server import Endpoint
from cosmos_core.types import Message, Prompt, ToolCall
from cosmos_environment_openai_agents.calculator import value_of
from cosmos_environment_openai_agents.plugin import AgentsOptions, SdkAgent, cosmos_environment

CALCULATOR = "cosmos_environment_openai_agents.calculator:calculator"
CONTEXT = EnvironmentContext(name="openai-agents", seed=0)


class Model:
    """Calls the calculator, and repeats what that has answered."""

    names = ("run",)

    def __init__(self, tool):
        self.calls, self.tool = [], tool

    def call(self, session, call):
        self.calls.append(call)
        last = call.messages[-1]
        if last.role == "tool":
            message = Message(role="assistant", content=f"#### {last.content}")
        else:
            asked = json.dumps({"expression": last.content})
            message = Message(
                role="assistant", content="", tool_calls=(ToolCall(name=self.tool, arguments=asked, id="c1"),)
            )
        reason = "tool_calls" if message.tool_calls else "stop"
        choice = Choice(message=message, reason=reason, num_units=1)
        future = Future()
        future.set_result(Reply(id=str(len(self.calls)), model="run", created=0, choices=(choice,), num_prompt_units=1))
        return future

    def refused(self):
        raise AssertionError


def play(task, tool="calculate", **options):
    """The calls that the program makes for a task."""
    model = Model(tool)
    endpoint = Endpoint(model, "127.0.0.1")
    endpoint.start()

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/s/x/v1", api_key="x") as client:
            agent = SdkAgent(AgentsOptions(agent=CALCULATOR, **options), CONTEXT)
            assert await agent.run(SimpleNamespace(client=client, model="run"), task) is None

    try:
        asyncio.run(run())
    finally:
        endpoint.close()
    return model.calls


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_the_program_does_a_task_by_either_api(api):
    first, second = play(Prompt(text="?", metadata={"sum": "34*56"}), input="{sum}", api=api)
    told = "\n".join(filter(None, [first.instructions, *(turn.content for turn in first.messages)]))
    assert told == "Answer with #### and the number.\n34*56"
    (tool,) = first.tools
    assert (tool["function"]["name"], tool["function"]["parameters"]["required"]) == ("calculate", ["expression"])
    call, answer = second.messages[-2:]
    assert (call.role, json.loads(call.tool_calls[0].arguments)) == ("assistant", {"expression": "34*56"})
    assert (answer.role, answer.content, answer.tool_call_id) == ("tool", "1904", "c1")
    invented = play(Prompt(text="34*56"), tool="add", api=api)[1].messages[-1]
    assert (invented.role, "add" in invented.content, "not found" in invented.content) == ("tool", True, True)


def test_a_row_is_what_the_program_is_asked():
    turns = (Message(role="user", content="1+"), Message(role="user", content="2*3"))
    assert play(Prompt(text="2*3"))[1].messages[-1].content == "6"
    assert [turn.content for turn in play(Prompt(text=turns))[0].messages][-2:] == ["1+", "2*3"]
    with pytest.raises(DataError, match=r"environment.options.input: the row has no 'question' in its metadata, but a"):
        play(Prompt(text="", metadata={"a": 1}), input="{question}")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*(3+4)", "84"),
        ("-2*3", "-6"),
        ("7/2", "7/2"),
        ("1/0", None),
        ("a+1", None),
        ("2**9", None),
        ("9" * 101, None),
    ],
)
def test_the_calculator_computes_and_says_what_it_cannot(expression, value):
    if value is not None:
        assert str(value_of(expression)) == value
        return
    with pytest.raises(ValueError, match=r"it has|is neither a number nor"):
        value_of(expression)


def test_what_is_no_agent_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("triage = 3")
    (tmp_path / "keyed.py").write_text("import os; os.environ['NO_SUCH_KEY']")
    (tmp_path / "run.py").write_text("raise SystemExit('usage')")
    for agent, words in [
        ("nowhere:agent", "'nowhere:agent' cannot be had: ModuleNotFoundError: No module named 'nowhere'"),
        (f"{tmp_path}/mine.py:other", "cannot be had: AttributeError"),
        (f"{tmp_path}/mine.py:triage", "is no agents.Agent but 3"),
        (f"{tmp_path}/gone.py:triage", "cannot be had: FileNotFoundError"),
        (f"{tmp_path}/keyed.py:triage", "cannot be had: KeyError: 'NO_SUCH_KEY'"),
        (f"{tmp_path}/run.py:triage", "cannot be had: SystemExit: usage"),
    ]:
        with pytest.raises(ConfigError, match=words):
            SdkAgent(AgentsOptions(agent=agent), CONTEXT)
    for agent in ("calculator", "module:", "module:a-b"):
        with pytest.raises(ValueError, match="names no object; write MODULE:NAME"):
            AgentsOptions(agent=agent)
    assert cosmos_environment().capabilities.calls_model
