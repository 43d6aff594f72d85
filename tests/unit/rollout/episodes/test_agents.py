"""Sessions of agents over real HTTP, with a scripted engine: what is recorded, refused and counted."""

from __future__ import annotations

import asyncio
import io
import json
import queue
import threading
import time
from contextlib import closing, contextmanager

import aiohttp
import attrs
import numpy as np
import openai
import pytest
import torch

from cosmos_core.config.schema import AgentConfig, EnvironmentConfig
from cosmos_core.errors import DataError, PluginBrokenError
from cosmos_core.models.documents import documents_of, pack_samples
from cosmos_core.models.packing import pack
from cosmos_core.models.plugin import create as create_model
from cosmos_core.models.tokens import array_of, decided, token_array, tokens_payload, values, view
from cosmos_core.models.vision.generic import GenericOptions
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EnvironmentCapabilities, ModelContext, Request, Sampling
from cosmos_core.protocols.model import ReadTurn
from cosmos_core.rollout.endpoint.calls import Call
from cosmos_core.rollout.endpoint.requests import read_response
from cosmos_core.rollout.endpoint.server import LARGEST_BODY, Endpoint
from cosmos_core.rollout.episodes.agents import Agents
from cosmos_core.rollout.episodes.messages import Begin, Ended, Failed
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.types import Message, Prompt, SampleStatus, ToolCall
from tests.scripted import Handle, generated
from tests.vision import checkpoint, picture

STOP = 1
WORDS = ["", "<end>", "system:", "user:", "assistant:", "tool:", "<tools>"]
CALCULATOR = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object"}}}


def ids_of(text):
    """Each word an id; words are numbered as they come."""
    for word in text.split():
        if word not in WORDS:
            WORDS.append(word)
    return [WORDS.index(word) for word in text.split()]


class Chat:
    """Writes turns as words, and reads `call:NAME:ARGUMENTS` as a call."""

    def _turns(self, turns):
        return [each for turn in turns for each in [*ids_of(f"{turn.role}: {turn.content}"), STOP]]

    def encode(self, prompt):
        turns = [Message(role="user", content=prompt.text)] if isinstance(prompt.text, str) else prompt.text
        if any(turn.role == "robot" for turn in turns):
            raise DataError("the chat template takes no turns of 'robot'")
        tools = ids_of("<tools>") if prompt.tools else []
        return tokens_payload([*tools, *self._turns(turns), *ids_of("assistant:")])

    def encode_turns(self, prompt, written, turns):
        self.written = list(written)
        end = [] if written[-1] == STOP else [STOP]
        return [*end, *self._turns(turns), *ids_of("assistant:")]

    def read_turn(self, prompt, ids):
        words = [WORDS[each] for each in ids if each != STOP]
        calls = [word.split(":", 2)[1:] for word in words if word.startswith("call:")] if prompt.tools else []
        content = " ".join(word for word in words if not (calls and word.startswith("call:")))
        malformed = tuple("a call without a name" for name, _ in calls if not name)
        made = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls)
        return ReadTurn(message=Message(role="assistant", content=content, tool_calls=made), malformed=malformed)

    def decode(self, payload):
        return " ".join(WORDS[each] for each in values(payload, "completion") if each != STOP)

    def pack(self, payloads, **limits):
        return pack(payloads, **limits)


class Engine:
    """Says what a script says of the words of the prompt, cut to the units that are asked for; or holds."""

    def __init__(self, script):
        self.script, self.requests, self.aborted, self.handles, self.holds = script, [], [], {}, False
        self.version = 3

    def submit(self, requests):
        handles = [Handle(each) for each in requests]
        for request, handle in zip(requests, handles, strict=True):
            self.requests.append(request)
            self.handles[request.request_id] = handle
            if not self.holds:
                self.answer(handle)
        return handles

    def answer(self, handle):
        request = handle.request
        words = " ".join(WORDS[each] for each in values(request.prompt, "prompt"))
        said = self.script(words, len(self.requests))
        said = [said] * request.sampling.num_samples if isinstance(said, str) else said
        handle.finish([self.made(request, ids_of(each)) for each in said])

    def made(self, request, ids):
        whole = [*ids, STOP]
        ids = whole[: request.sampling.max_units]
        told = {"version": self.version, "number": len(self.requests)}
        return generated(request, ids, is_whole=len(ids) == len(whole), **told)

    def abort(self, names):
        self.aborted += names


class Pool:
    """Agents that are this test."""

    def __init__(self):
        self.begun, self.answers, self.forgotten = [], [], []

    def begin(self, begin, answer):
        self.begun.append(begin)
        self.answers.append(answer)
        return len(self.begun) - 1

    def forget(self, episode):
        self.forgotten.append(episode)


class Rig:
    def __init__(
        self,
        script,
        *,
        max_units=64,
        longest=200,
        samples=1,
        temperature=1.0,
        rewards=False,
        model=None,
        engine=None,
        **config,
    ):
        self.engine, self.pool, self.events = engine or Engine(script), Pool(), queue.SimpleQueue()
        self.agents = Agents(
            environment=EnvironmentConfig(plugin="agent", **config),
            capabilities=EnvironmentCapabilities(calls_model=True, rewards=rewards),
            model=model or Chat(),
            engine=self.engine,
            pool=self.pool,
            version=lambda: self.engine.version,
            post=self.events.put,
            name="run",
            sees=model is not None,
        )
        self.endpoint = Endpoint(self.agents, "127.0.0.1")
        self.played = queue.SimpleQueue()
        sampling = Sampling(max_units=max_units, num_samples=samples, temperature=temperature)
        prompt = Prompt(text="task")
        self.request = Request(request_id="7", prompt=Chat().encode(prompt), sampling=sampling, seed=1)
        self.begin = lambda: self.agents.begin(self.request, prompt, longest=longest, done=self.played.put)

    def run(self):
        while (event := self.events.get()) is not None:
            event()

    def end(self, index=0, reward=None):
        self.pool.answers[index](Ended(episode=index, reward=reward))

    def client(self, index=0):
        begin = self.pool.begun[index]
        return openai.AsyncOpenAI(base_url=begin.base_url, api_key=begin.key, max_retries=0, timeout=10)

    def call(self, agent, index=0):
        """Run an agent with a client of a session."""

        async def called():
            async with self.client(index) as client:
                return await agent(client)

        return asyncio.run(called())

    def sample(self):
        (played,) = self.played.get(timeout=10)
        return played


@contextmanager
def rig(script, *, samples=1, **settings):
    made = Rig(script, samples=samples, **settings)
    made.endpoint.start()
    made.agents.url = made.endpoint.url
    thread = threading.Thread(target=made.run)
    thread.start()
    made.begin() if samples == 1 else made.events.put(made.begin)
    try:
        yield made
    finally:
        made.endpoint.close()
        made.endpoint.check()
        made.events.put(None)
        thread.join()


def user(text):
    return {"role": "user", "content": text}


def documents(generated):
    """Of each document: the prompt, and the rest with what the model decided in brackets."""
    found = []
    for each in documents_of(generated.payload):
        parts = [
            f"[{WORDS[i]}]" if d else WORDS[i] for i, d in zip(values(each, "completion"), decided(each), strict=True)
        ]
        found.append((" ".join(WORDS[i] for i in values(each, "prompt")), " ".join(parts)))
    return found


def test_a_dialogue_with_tools_is_one_document_of_the_engines_own_ids():
    def script(words, number):
        return 'call:calculate:{"a":1}' if "tool:" not in words else "it is 4"

    async def agent(client):
        messages = [{"role": "system", "content": "be brief"}, user("2+2")]
        first = await client.chat.completions.create(model="run", messages=messages, tools=[CALCULATOR])
        (call,) = first.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("calculate", {"a": 1})
        assert (first.choices[0].finish_reason, first.choices[0].message.content) == ("tool_calls", None)
        # As a framework sends it back: other keys, other white space in the arguments.
        back = first.choices[0].message.model_dump(exclude_none=True)
        back["tool_calls"][0]["function"]["arguments"] = '{ "a": 1 }'
        messages += [back, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        stream = await client.chat.completions.create(
            model="run", messages=messages, tools=[CALCULATOR], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "it is 4"
        assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "stop"
        assert chunks[-1].usage.completion_tokens == 4

    with rig(script, rewards=True) as made:
        made.call(agent)
        made.end(reward=0.5)
        played = made.sample()
        assert made.agents.counts == {
            "agent_calls": 2,
            "agent_calls_refused": 0,
            "tool_calls_malformed": 0,
            "branches": 0,
        }
    assert (played.status, played.reward, played.detail) == (SampleStatus.OK, 0.5, "agent: 2 calls")
    assert documents(played.generated) == [
        (
            "<tools> system: be brief <end> user: 2+2 <end> assistant:",
            '[call:calculate:{"a":1}] [<end>] tool: 4 <end> assistant: [it] [is] [4] [<end>]',
        )
    ]
    ids = values(played.generated.payload, "completion")
    own = ids[decided(played.generated.payload)]
    assert values(played.generated.payload, "logprobs").tolist() == [-each for each in own]
    # Each unit's record is that of the first forward it went through.
    assert values(played.generated.payload, "routing").tolist() == [1] * 10 + [2] * 8
    assert [turn.role for turn in played.said] == ["system", "user", "assistant", "tool", "assistant"]
    assert played.text == 'call:calculate:{"a":1} tool: 4 assistant: it is 4'


def test_agents_show_images_and_each_branch_keeps_its_own(make, tmp_path):
    context = ModelContext(path=str(checkpoint(tmp_path / "qwen2_vl", "qwen2_vl")), config=None, assets=tmp_path / "no")
    model = create_model(GenericOptions(), context)
    wide, small = picture(40, 24, 1), picture(20, 20, 2)

    async def agent(client):
        async def ask(*messages):
            reply = await client.chat.completions.create(model="run", messages=list(messages), max_tokens=5)
            return {"role": "assistant", "content": reply.choices[0].message.content}

        shown = user([{"type": "text", "text": "what is "}, image(wide), {"type": "text", "text": "?"}])
        first = await ask(shown)
        await ask(shown, first, user([image(small), {"type": "text", "text": "or"}, image(wide)]))
        # transformers' model takes neighbours, with no token between, for one.
        with pytest.raises(
            openai.BadRequestError, match="this cannot be generated from: request '7/0/2': what is seen"
        ):
            await ask(user([image(small), image(wide)]))
        # Of the same words with another image nothing is known.
        await ask(user([{"type": "text", "text": "what is "}, image(small), {"type": "text", "text": "?"}]))
        parts = [{"type": "input_text", "text": "crop"}, {"type": "input_image", "image_url": small}]
        await client.responses.create(model="run", input=[user(parts)], max_output_tokens=5)
        crop = {"type": "function_call_output", "call_id": "1", "output": parts}
        (tool,) = read_response({"input": [crop]}).messages
        assert (tool.role, tool.content, tool.media, tool.places) == ("tool", "crop", (small,), (4,))

    engine = make(model, context_length=300)
    with rig(None, model=model, engine=engine, longest=300) as made:
        made.engine.version = 0
        made.call(agent)
        made.end()
        payload = made.sample().generated.payload
    parts = documents_of(payload)
    assert [len(view(part, "media.image_grid_thw")) for part in parts] == [3, 1, 1]
    for part in parts:
        placeholders = values(part, "kinds") == 1
        assert placeholders.sum() == len(view(part, "media.pixel_values")) // 4
        ids = np.concatenate([values(part, "prompt"), values(part, "completion")])[: len(placeholders)]
        assert set(ids[placeholders]) == {model.tokenizer.convert_tokens_to_ids("<|image_pad|>")}
    module = model.build(seed=1, dtype=torch.float32, device=torch.device("cpu"))
    found = np.zeros(len(values(payload, "logprobs")), np.float32)
    for batch in pack_samples(model, [payload], budget=400):
        with torch.no_grad():
            rest = model.decide(module, batch, temperature=1.0).logprobs_N.numpy()
        for span, number in zip(batch.spans, batch.num_decisions, strict=True):
            found[span.first : span.first + number], rest = rest[:number], rest[number:]
    np.testing.assert_allclose(found, values(payload, "logprobs"), atol=1e-5, rtol=0)


def test_another_history_begins_a_branch_and_nothing_is_trained_twice():
    async def agent(client):
        async def ask(*messages, **more):
            reply = await client.chat.completions.create(model="run", messages=list(messages), **more)
            await client.post("/reward", body={"reward": 0.5, "reply": reply.id}, cast_to=object)
            return [{"role": "assistant", "content": each.message.content} for each in reply.choices]

        (first,) = await ask(user("a"))
        await ask(user("a"), first, user("b"))
        # Two answers to one question, a compacted history, and a history whose end is another.
        await ask(user("a"), first, user("c"), n=2)
        await ask(user("a in short"), user("d"))
        await ask(user("a"), {"role": "assistant", "content": "rewritten"}, user("e"))

    with rig(lambda words, number: f"r{number}" if number != 3 else ["r3", "r3b"], rewards=True, weight=2.0) as made:
        made.call(agent)
        made.end()
        played = made.sample()
    assert documents(played.generated) == [
        ("user: a <end> assistant:", "[r1] [<end>] user: b <end> assistant: [r2] [<end>]"),
        ("user: a <end> assistant: r1 <end> user: c <end> assistant:", "[r3] [<end>]"),
        ("user: a <end> assistant: r1 <end> user: c <end> assistant:", "[r3b] [<end>]"),
        ("user: a in short <end> user: d <end> assistant:", "[r4] [<end>]"),
        ("user: a <end> assistant: rewritten <end> user: e <end> assistant:", "[r5] [<end>]"),
    ]
    payload = played.generated.payload
    assert played.generated.num_units == 12 == len(values(payload, "logprobs"))
    assert (played.reward, values(payload, "turns").tolist()) == (2.5, [2] * 6)
    assert values(payload, "turn_rewards").tolist() == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0], "with the weight of the recipe"
    assert played.detail == "agent: 6 calls; 5 branches"
    # What a model packs are documents; the decisions of all are the sample's, in its order.
    batches = pack_samples(Chat(), [tokens_payload([5], [6]), payload], budget=24)
    pieces = [
        (sequence, span.first, span.total, number)
        for batch in batches
        for sequence, span, number in zip(batch.sequences, batch.spans, batch.num_decisions, strict=True)
    ]
    sizes = ((0, 4), (4, 2), (6, 2), (8, 2), (10, 2))
    assert sorted(pieces) == [(0, 0, 1, 1), *[(1, first, 12, number) for first, number in sizes]]
    by_first = {first: index for index, (sequence, first, *_) in enumerate(pieces) if sequence == 1}
    targets = np.concatenate([batch.inputs["targets"].numpy() for batch in batches])
    starts = np.cumsum([0, *[number for *_, number in pieces]])
    own = [targets[starts[by_first[first]] :][:number] for first, number in sizes]
    assert np.concatenate(own).tolist() == [-each for each in values(payload, "logprobs").tolist()]


def test_calls_of_what_there_is_not_and_calls_that_are_not_wanted_are_words():
    async def agent(client):
        async def said(**more):
            reply = await client.chat.completions.create(model="run", messages=[user("a")], tools=[CALCULATOR], **more)
            (choice,) = reply.choices
            assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
            return choice.message.content

        assert await said() == "call:launch:{}"
        assert await said() == "call::{}"
        assert await said(tool_choice="none") == "call:calculate:{}"

    replies = ["call:launch:{}", "call::{}", "call:calculate:{}"]
    with rig(lambda words, number: replies[number - 1]) as made:
        made.call(agent)
        made.end()
        played = made.sample()
        assert made.agents.counts["tool_calls_malformed"] == 3
    assert played.detail == "agent: 3 calls; 3 branches; 3 malformed calls"


def test_an_evaluations_choices_are_the_likeliest_each():
    async def agent(client):
        reply = await client.chat.completions.create(model="run", messages=[user("a")], n=2)
        assert [each.message.content for each in reply.choices] == ["r1", "r2"]

    with rig(lambda words, number: f"r{number}", temperature=0.0) as made:
        made.call(agent)
        assert [each.sampling.num_samples for each in made.engine.requests] == [1, 1], "of a greedy one there is one"


def test_responses_are_served_too():
    def script(words, number):
        return "call:calculate:{}" if number == 1 else "four" if number == 2 else "x"

    async def agent(client):
        tool = {"type": "function", **CALCULATOR["function"], "strict": True}
        first = await client.responses.create(model="run", instructions="brief", input="2+2", tools=[tool])
        (call,) = first.output
        assert (call.type, call.name, call.arguments) == ("function_call", "calculate", "{}")
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        async with client.responses.stream(
            model="run", instructions="brief", input=[user("2+2"), call.model_dump(), answer], tools=[tool]
        ) as stream:
            second = await stream.get_final_response()
        assert (second.output_text, second.status) == ("four", "completed")
        third = await client.responses.create(
            model="run", instructions="brief", input="m", tools=[tool], previous_response_id=second.id
        )
        assert third.output_text == "x"

    with rig(script) as made:
        made.call(agent)
        made.end()
        played = made.sample()
    assert documents(played.generated) == [
        (
            "<tools> system: brief <end> user: 2+2 <end> assistant:",
            "[call:calculate:{}] [<end>] tool: 4 <end> assistant: [four] [<end>] user: m <end> assistant: [x] [<end>]",
        )
    ]


def test_a_reply_ends_before_a_text_and_goes_on_from_what_was_generated():
    text = " ".join(f"w{index}" for index in range(50))

    async def agent(client):
        reply = await client.chat.completions.create(
            model="run", messages=[user("count")], stop=["w40 w41"], logprobs=True
        )
        (choice,) = reply.choices
        assert (choice.message.content.split()[-1], choice.finish_reason) == ("w39", "stop")
        assert len(choice.logprobs.content) == 42
        said = {"role": "assistant", "content": choice.message.content}
        await client.chat.completions.create(model="run", messages=[user("count"), said, user("on")], max_tokens=2)

    def script(words, number):
        done = len(words.split("assistant:")[-1].split())
        return " ".join(text.split()[done:]) if "on" not in words.split() else "yes indeed sir"

    with rig(script) as made:
        made.call(agent)
        made.end()
        played = made.sample()
    ((_, rest),) = documents(played.generated)
    assert rest.endswith("[w40] [w41] <end> user: on <end> assistant: [yes] [indeed]")
    assert played.status is SampleStatus.OK, "its own bound cut the last reply"
    # What is encoded next goes on from all of the reply.
    assert len(made.agents.model.written) == 42
    # One question, then the rest of it: what was looked through in two parts.
    assert [each.sampling.max_units for each in made.engine.requests] == [32, 32, 2]


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


REFUSED = [
    ({"messages": [user("a")], "model": "gpt-9"}, 404, "the model 'gpt-9' is not served, but 'run', 'gpt-4.1'; envi"),
    ({"messages": [], "model": "run"}, 400, "the request cannot be read: Expected `array` of length >= 1"),
    ({"messages": [user("a")], "logit_bias": {"1": 2}}, 400, "logit_bias: {'1': 2} cannot be done here; leave it out"),
    ({"messages": [user("a")], "beam": 4}, 400, "the request cannot be read: Object contains unknown field `beam`"),
    ({"messages": [{"role": "robot", "content": "a"}]}, 400, "the chat template takes no turns of 'robot'"),
    ({"messages": [user([{"type": "audio"}])]}, 400, "messages[0]: a part of type 'audio'; only text and images"),
    ({"messages": [user([{"type": "image_url"}])]}, 400, "messages[0]: an image without `image_url`"),
    ({"messages": [user([image("http://there/is.png")])]}, 400, "'http://there/is.png' is no data: URL in base64, and"),
    ({"messages": [user([image("file:///etc/passwd")])]}, 400, "'file:///etc/passwd' is no data: URL in base64, and n"),
    ({"messages": [user([image("data:image/png;base64,a")])]}, 400, "messages[0]: the image is no base64"),
    ({"messages": [user([image("data:image/png;base64,YWJj")])]}, 400, "cannot be read as one of PNG, JPEG, WEBP"),
    ({"messages": [user([image(picture(4097, 4096))])]}, 400, "4097 x 4096 pixels; the most are 16777216 and 16777216"),
    ({"messages": [user([image(picture(20, 20))])]}, 400, "the turns show 1 images, and the dialogues of this run are"),
    ({"messages": [user("a"), {"role": "assistant", "content": [image(picture(2, 2))]}]}, 400, "own turn has an image"),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, 400, "the last message is the model's own"),
    ({"messages": [user("a")], "stream": "perhaps"}, 400, "stream, stream_options: Expected `bool`, got `str`"),
    ({"messages": [{"role": "user", "content": "a", "function_call": {}}]}, 400, "messages[0].function_call: calls"),
    ({"messages": [user("a")], "tools": [{"type": "function"}]}, 400, "tool"),
    ({"messages": [user("a")], "tools": [CALCULATOR, CALCULATOR]}, 400, "calculate"),
    (b"{", 400, "the body is no JSON object: Input data was truncated"),
    (b'"' + b"x" * LARGEST_BODY + b'"', 413, "the body has more than"),
]


def test_what_cannot_be_answered_is_refused_in_openais_shape_and_counted():
    async def agent(url, key):
        async with aiohttp.ClientSession() as client:
            for body, status, words in REFUSED:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                async with client.post(f"{url}/chat/completions", data=io.BytesIO(data)) as reply:
                    error = (await reply.json())["error"]
                    assert (reply.status, words in error["message"]) == (status, True), error
                    assert {"message", "type", "param", "code"} == error.keys()

            async def told(path, body=None, **more):
                """The status of a reply, and what it holds."""
                method, data = (client.get, {}) if body is None else (client.post, {"data": json.dumps(body)})
                async with method(path, **data, **more) as reply:
                    return reply.status, await reply.json()

            root = url.split("/s/")[0]
            call = {"messages": [user("a")], "model": "gpt-4.1"}
            named = [({}, 401), ({"Authorization": "Bearer no"}, 401), ({"Authorization": f"Bearer {key}"}, 200)]
            for headers, status in [*named, ({"X-Session": key, "Authorization": "Bearer x"}, 200)]:
                assert (await told(f"{root}/v1/chat/completions", call, headers=headers))[0] == status
            assert [each["id"] for each in (await told(f"{root}/v1/models"))[1]["data"]] == ["run", "gpt-4.1"]
            _, empty = await told(f"{url}/responses", {"input": [{"type": "reasoning"}]})
            assert empty["error"]["message"] == "there are no messages; give one at least"
            deep = {"function": {"name": "calculate", "arguments": "[" * 100_000}, "id": "c"}
            turns = [user("a"), {"role": "assistant", "content": None, "tool_calls": [deep]}, user("b")]
            status, known = await told(f"{url}/chat/completions", {"messages": turns})
            assert status == 200
            assert (await told(f"{url}/models/gpt-4.1"))[1]["id"] == "gpt-4.1"
            assert (await told(f"{url}/nothing"))[1]["error"]["message"].startswith("GET /s/")
            for value, status in ((float("inf"), 400), ("x", 400), (10**400, 400), (0.25, 200)):
                assert (await told(f"{root}/s/{key}/reward", {"reward": value}))[0] == status
            for name, status in ((known["id"], 200), ("other", 404), ([], 404)):
                assert (await told(f"{url}/reward", {"reward": 0.5, "reply": name}))[0] == status

    with rig(lambda words, number: "yes", rewards=True, agent=AgentConfig(names=("gpt-4.1",))) as made:
        begin = made.pool.begun[0]
        asyncio.run(agent(begin.base_url, begin.key))
        made.end()
        played = made.sample()
        assert made.agents.counts["agent_calls_refused"] == len(REFUSED) + 9
    assert (played.status, played.reward) == (SampleStatus.OK, 0.75)


def calling(times):
    async def agent(client):
        for index in range(times):
            try:
                await client.chat.completions.create(model="run", messages=[user(f"q{index}")])
            except openai.APIStatusError as error:
                return error
        return None

    return agent


BOOM, SLOW = (Failed(episode=0, timed_out=late, detail=why) for late, why in ((False, "boom"), (True, "slow")))
LOST, END = Failed(episode=0, timed_out=False, detail="lost", is_lost=True), Ended(episode=0, reward=None)
FAILED, TRUNCATED = SampleStatus.ENVIRONMENT_FAILED, SampleStatus.TRUNCATED


@pytest.mark.parametrize(
    ("times", "settings", "reply", "status", "detail"),
    [
        (3, {"max_turns": 2}, END, TRUNCATED, "2 calls; 2 branches; all 2 calls"),
        (3, {"max_units": 4}, END, TRUNCATED, "a reply was cut after 1 units"),
        (2, {"longest": 4}, BOOM, FAILED, "of the model: a prompt of 4 units"),
        (2, {"longest": 6}, BOOM, TRUNCATED, "a reply was cut after 2"),
        (1, {}, BOOM, FAILED, "agent: 1 call; boom"),
        (0, {}, END, FAILED, "the agent ended without a reply of the model"),
        (1, {"weight": 1.0}, END, FAILED, "ended without a reward, and environment.weight"),
        (1, {}, SLOW, SampleStatus.ENVIRONMENT_TIMEOUT, "slow"),
        (1, {"max_turns": 1}, LOST, SampleStatus.ENVIRONMENT_LOST, "lost"),
    ],
)
def test_every_end_of_a_session(times, settings, reply, status, detail):
    with rig(lambda words, number: "yes yes", **settings) as made:
        refusal = made.call(calling(times))
        assert refusal is None or refusal.code in ("max_turns", "context_length_exceeded")
        made.pool.answers[0](reply)
        played = made.sample()
        assert played.status is status
        assert detail in played.detail
        # Nothing is called for it any more.
        assert made.call(calling(1)).code == "invalid_session"


def test_a_client_that_leaves_is_not_answered_and_a_session_that_ends_refuses_what_waits():
    async def agent(client):
        waiting = [asyncio.ensure_future(calling(1)(client)) for _ in range(2)]
        while len(made.engine.requests) < 2:  # noqa: ASYNC110 - another thread's
            await asyncio.sleep(0.01)
        waiting[0].cancel()
        while not made.engine.aborted:  # noqa: ASYNC110 - another thread's
            await asyncio.sleep(0.01)
        (gone,) = made.engine.aborted
        for handle in list(made.engine.handles.values()):
            if handle.request.request_id == gone:
                made.engine.answer(handle)
        made.end()
        return (await waiting[1]).code

    with rig(lambda words, number: "yes") as made:
        made.engine.holds = True
        assert made.call(agent) == "session_over"
        played = made.sample()
    assert (played.status, played.generated.num_units) == (FAILED, 0)


def test_a_client_that_gives_up_before_its_turn_costs_nothing():
    with rig(lambda words, number: "yes", rewards=True) as made:
        key = made.pool.begun[0].key
        made.events.put(lambda: time.sleep(0.2))
        call = Call(model="run", messages=(Message(role="user", content="a"),))
        for given_up in (made.agents.reward(key, 0.5), made.agents.call(key, call)):
            assert given_up.cancel()
        assert made.call(calling(1)) is None
        made.end()
        assert made.sample().status is SampleStatus.OK
    assert len(made.engine.requests) == 1


def test_a_group_is_done_with_its_last_agent_and_may_be_abandoned():
    with rig(lambda words, number: "yes", samples=2) as made:
        while len(made.pool.begun) < 2:
            pass
        assert len({begin.key for begin in made.pool.begun}) == 2
        assert len({begin.seed for begin in made.pool.begun}) == 1
        for index in (1, 0):
            made.call(calling(1), index)
            made.end(index)
        assert [each.status for each in made.played.get(timeout=10)] == ["ok", "ok"]
        made.events.put(made.begin)
        while len(made.pool.begun) < 4:
            pass
        made.events.put(lambda: made.agents.abandon("7"))
        assert made.call(calling(1), 2).code == "invalid_session"
        assert made.agents.abandon("7") is False


def test_documents_that_do_not_fit_are_refused():
    payload = tokens_payload([5], [6, 7, 8])

    def told(sizes, flags):
        arrays = {**payload.arrays, "documents": token_array(sizes), "decided": array_of(np.array(flags))}
        return attrs.evolve(payload, arrays=arrays)

    for sizes in ([2], [], [4, -1]):
        with pytest.raises(DataError, match=r"`documents` .* of a completion of 3 units; they are parts of it"):
            documents_of(told(sizes, [True] * 3))
    with pytest.raises(DataError, match="document 1 begins with a unit that the model decided"):
        documents_of(told([1, 2], [True] * 3))


AGENT = """
import asyncio, os, time


async def agent(session, task, *, factor: float = 1.0):
    match task.text:
        case "raise":
            raise KeyError("lost")
        case "nan":
            return float("nan")
        case "hang":
            await asyncio.sleep(60)
        case "hog":
            bytearray(4 << 30)
        case "die":
            os._exit(3)
        case "quiet":
            return None
        case "call":
            reply = await session.client.chat.completions.create(
                model=session.model, messages=[{"role": "user", "content": "a"}]
            )
            return factor * len(reply.choices[0].message.content)
    await asyncio.sleep(0.2)
    return float(session.variables["COSMOS_SEED"])


def plain(session, task):
    if task.text == "client":
        session.client
    time.sleep(0.01)
    return 2.0
"""


def test_agents_run_in_a_worker_some_at_once_and_end_in_every_way(tmp_path, caplog):
    file = tmp_path / "mine.py"
    file.write_text(AGENT)

    def pool(name, concurrency, **agent):
        config = EnvironmentConfig(
            plugin=f"{file}:{name}", options={"factor": 2.0} if name == "agent" else {},
            agent=AgentConfig(concurrency=concurrency, timeout_s=8.0, **agent),
        )  # fmt: skip
        made = EnvironmentPool(config, seed=0)
        made.start()
        return closing(made)

    replies = queue.SimpleQueue()

    def begin(pool, url, *texts):
        fields = {"base_url": url, "key": "k", "model": "run", "seed": 5}

        def ended(reply):
            pool.forget(reply.episode)
            replies.put(reply)

        return [pool.begin(Begin(episode=-1, prompt=Prompt(text=text), **fields), ended) for text in texts]

    def told(number):
        found = [replies.get(timeout=30) for _ in range(number)]
        return sorted((each.episode, each.reward if isinstance(each, Ended) else each.detail) for each in found)

    with rig(lambda words, number: "yes") as made, pool("agent", 2, memory_gb=3.0) as agents:
        url = made.pool.begun[0].base_url
        begin(agents, url, "call", "raise", "nan", "quiet", "hog", "sleep")
        assert told(6) == [
            (0, 6.0),
            (1, "KeyError: 'lost' (mine.py:8)"),
            (2, "run: the reward is no finite number but nan"),
            (3, None),
            (4, "MemoryError (mine.py:14)"),
            (5, 5.0),
        ]
        (told_of,) = [each.getMessage() for each in caplog.records if "raised at mine.py:8" in each.getMessage()]
        assert 'File "' in told_of, "where it raised is in the log, with the calls that led there"
        # Two run at once; the one that is forgotten while it waits never begins.
        episodes = begin(agents, url, *["sleep"] * 6)
        agents.forget(episodes[5])
        began = time.monotonic()
        assert [each for each, _ in told(5)] == episodes[:5]
        assert time.monotonic() - began > 0.55
        begin(agents, url, "hang")
        assert told(1) == [(12, "no answer within 8 s")]
        begin(agents, url, "die")
        assert told(1) == [(13, "the process of this episode ended while it had its turn (exit code 3)")]
        begin(agents, url, "call", "raise")
        assert told(2) == [(14, 6.0), (15, "KeyError: 'lost' (mine.py:8)")]
        assert sum("raised at mine.py:8" in each.getMessage() for each in caplog.records) == 1
    with pool("plain", 8) as agents:
        begin(agents, "http://none", "a", "b", "client")
        *done, (_, refused) = told(3)
        assert done == [(0, 2.0), (1, 2.0)]
        assert "a plain function makes a client of its own, openai.OpenAI(base_url=session.base_url" in refused


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def mine(session): ...", "it takes session; an agent takes a session and a task"),
        ("class mine:\n    def __init__(self, a, b): ...\n    def run(self): ...", "the class is made of a, b"),
    ],
)
def test_a_function_that_is_no_agent_is_refused(tmp_path, source, words):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(PluginBrokenError, match=words):
        PluginSet.load([("environment", f"{tmp_path}/bad.py:mine")])
