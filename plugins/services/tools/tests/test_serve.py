"""A model served to clients of OpenAI's API, over real sockets; and vLLM's own server, of which a script stands in."""

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import aiohttp
import numpy as np
import psutil
import pytest
from aiohttp.test_utils import TestServer
from PIL import Image

from cosmos_core.config.checks import is_loopback
from cosmos_core.errors import ConfigError, EngineError
from cosmos_core.models.tokens import array_of, tokens_payload
from cosmos_core.protocols import FinishReason, Generated
from cosmos_core.types import Payload
from cosmos_service_tools import vllm_server
from cosmos_service_tools.answers import Speaker, speaking
from cosmos_service_tools.server import Service, listen
from cosmos_service_tools.vllm_server import serve_vllm

CHAT = {"messages": [{"role": "user", "content": "3 + 4"}], "temperature": 0, "max_tokens": 12}
TEXT = {"prompt": "3 + 4", "temperature": 0, "max_tokens": 12}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SAID = """<think>
sum
</think>
so<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>"""


def picture():
    """A part of a message that shows a pixel."""
    held = io.BytesIO()
    Image.new("RGB", (1, 1)).save(held, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@contextmanager
def asking(model):
    """Send requests, (path, body to be JSON), to a server of a model: (status, text) of each reply."""
    with (
        speaking(model, plugin=None, trust_remote_code=False) as speaker,
        ThreadPoolExecutor(8) as threads,
    ):

        async def sent(requests, **options):
            application = Service(speaker, "tiny", threads, only_here=True).application()
            replies = []
            async with TestServer(application) as server, aiohttp.ClientSession() as client:
                for path, body in requests:
                    method = client.get if body is None else client.post
                    data = {} if body is None else body if "data" in body else {"json": body}
                    async with method(server.make_url(path), **{**options, **data}) as reply:
                        replies.append((reply.status, await reply.text()))
            return replies

        yield lambda *requests, **options: asyncio.run(sent(requests, **options))


@pytest.fixture
def ask(here):
    with asking(here / "models/chat") as ask:
        yield ask


def test_a_model_that_learned_from_plain_prompts_completes_a_chat_of_one_turn(plain_export):
    turns = [*CHAT["messages"], {"role": "assistant", "content": "7"}, *CHAT["messages"]]
    with asking(plain_export) as ask:
        chat, text, longer = ask(
            ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/v1/chat/completions", {"messages": turns})
        )
    assert json.loads(chat[1])["choices"][0]["message"]["content"] == json.loads(text[1])["choices"][0]["text"]
    assert longer[0] == 400
    assert "a chat is one turn of the user's here" in json.loads(longer[1])["error"]["message"]


def test_clients_are_answered(ask):
    models, chat, text, several = [
        json.loads(reply)
        for _, reply in ask(
            ("/v1/models", None),
            ("/v1/chat/completions", CHAT | {"model": "tiny", "presence_penalty": 0, "user": "me", "stop": None}),
            ("/v1/completions", TEXT),
            ("/v1/completions", TEXT | {"prompt": ["3", "4"], "n": 2, "temperature": 1, "seed": 3}),
        )
    ]
    assert [each["id"] for each in models["data"]] == ["tiny"]
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["choices"][0]["finish_reason"] in ("stop", "length")
    assert text["object"] == "text_completion"
    assert text["usage"]["total_tokens"] == text["usage"]["prompt_tokens"] + text["usage"]["completion_tokens"]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]

    # A stream has the same text, in parts.
    for path, body, whole, words in [
        ("/v1/chat/completions", CHAT, chat["choices"][0]["message"]["content"], lambda it: it["delta"]["content"]),
        ("/v1/completions", TEXT, text["choices"][0]["text"], lambda it: it["text"]),
    ]:
        ((status, streamed),) = ask((path, body | {"stream": True, "stream_options": {"include_usage": True}}))
        *events, done = [event.removeprefix("data: ") for event in streamed.strip().split("\n\n")]
        parts = [json.loads(event) for event in events]
        assert (status, done) == (200, "[DONE]")
        assert len(parts) > 3
        assert "".join(words(choice) for part in parts for choice in part["choices"]) == whole
        assert parts[-2]["choices"][0]["finish_reason"]
        assert parts[-1]["usage"]["completion_tokens"] > 0


def test_calls_of_tools_and_thoughts_are_told_apart(ask, monkeypatch):
    rest = []

    def said(self, prompt, sampling, seed):
        """What comes next of `SAID`."""
        left = rest or self._served.model.tokenizer.encode(SAID)
        new, rest[:] = left[: sampling.max_units], left[sampling.max_units :]
        logprobs = array_of(np.arange(len(new), dtype=np.float32))
        payload = Payload(kind="tokens", arrays={**tokens_payload([0], new).arrays, "logprobs": logprobs})
        reason = FinishReason.LENGTH if rest else FinishReason.STOP
        return Generated(payload=payload, reason=reason, oldest_version=0, newest_version=0, num_units=len(new))

    monkeypatch.setattr(Speaker, "_ask", said)
    body = CHAT | {"max_tokens": 200}
    chat, streamed, called, response, cut = (
        reply
        for _, reply in ask(
            ("/v1/chat/completions", body | {"tools": [ADD], "logprobs": True}),
            ("/v1/chat/completions", body | {"stream": True}),
            ("/v1/chat/completions", body | {"stream": True, "tools": [ADD]}),
            ("/v1/responses", {"input": "3", "instructions": "Add.", "tools": [{"type": "function", "name": "add"}]}),
            ("/v1/chat/completions", body | {"stop": "o<t"}),
        )
    )
    (choice,) = json.loads(chat)["choices"]
    message, told = choice["message"], choice["logprobs"]["content"]
    assert (choice["finish_reason"], message["content"], message["reasoning_content"]) == ("tool_calls", "so", "sum")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 3}'}
    assert "".join(each["token"] for each in told) == SAID
    assert [each["logprob"] for each in told[:5]] == [0, 1, 2, 3, 0]
    # A stop ends what is generated, at the token that has it.
    (choice,), usage = json.loads(cut)["choices"], json.loads(cut)["usage"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "s")
    words = "".join(each["token"] for each in told[: usage["completion_tokens"]])
    assert SAID.startswith(words)
    assert words.endswith("o<t")
    # Where nothing may be a call, what is said and thought is told as it comes.
    events = [json.loads(event.removeprefix("data: ")) for event in streamed.strip().split("\n\n")[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta["content"] for delta in deltas) == SAID.partition("</think>\n")[2]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "sum"
    assert '"tool_calls": [{"index": 0' in called
    assert [item["type"] for item in json.loads(response)["output"]] == ["reasoning", "message", "function_call"]


def test_what_cannot_be_answered_is_refused_in_a_sentence(ask):
    chats = [
        (CHAT | {"top_p": 0}, 400, "Expected `float` > 0.0 - at `$.top_p`"),
        (CHAT | {"model": "other"}, 404, "the model 'other' is not served here, but 'tiny'"),
        (CHAT | {"messages": [{"role": "user", "content": "3 " * 300}]}, 400, "fill the model's context of 256"),
        (
            CHAT | {"messages": [{"role": "user", "content": [picture()]}], "stream": True},
            400,
            "the turns show 1 images",
        ),
        ({"data": b"{}"}, 415, "requests are JSON (Content-Type: application/json)"),
    ]
    texts = [
        (TEXT | {"n": 2, "stream": True}, 400, "stream: one completion at a time is streamed, and 2 are asked for"),
        (TEXT | {"tools": [ADD]}, 400, "tools are for chats"),
        (TEXT | {"echo": True}, 400, "Object contains unknown field `echo`"),
        (TEXT | {"prompt": []}, 400, "prompt: []; give a text, or a list of up to 16"),
    ]
    refusals = [("/v1/chat/completions", *each) for each in chats] + [("/v1/completions", *each) for each in texts]
    refusals += [("/v1/responses", {"input": "3", "previous_response_id": "resp_1"}, 400, "replies are not kept here")]
    replies = ask(*((path, body) for path, body, _, _ in refusals))
    for (_, _, status, words), (found, reply) in zip(refusals, replies, strict=True):
        assert (found, words in json.loads(reply)["error"]["message"]) == (status, True), reply
    assert [status for status, _ in ask(("/v1/nothing", None))] == [404]
    # A name of another site that leads here is no way in.
    ((status, reply),) = ask(("/v1/models", None), headers={"Host": "evil.example"})
    assert (status, json.loads(reply)["error"]["message"]) == (403, "the host 'evil.example' is not this machine's")


def test_ports_and_addresses(cosmos, here, capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--host, --port: cannot listen at 127.0.0.1:{port}: Address already"):
            cosmos("serve", "models/chat", "--port", port)
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.com")] == [True] * 3 + [
        False
    ] * 2
    with pytest.raises(ConfigError, match="gone: there is no such folder"):
        cosmos("serve", "gone", "--port", "0", "--host", "0.0.0.0")


def test_ctrl_c_ends_it_while_it_answers(here):
    code = "import typer; from cosmos_service_tools.serve import serve; typer.run(serve)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "models/chat", "--port", "0", "--engine", "embedded"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        words = process.stderr.readline()
        assert words.startswith("Serving chat at http://127.0.0.1:"), words
        url = words.split()[3]

        async def begin():
            async with aiohttp.ClientSession() as client:
                long = CHAT | {"max_tokens": 200, "stream": True, "temperature": 1}
                async with client.post(f"{url}/chat/completions", json=long) as reply:
                    await reply.content.readline()
                    process.send_signal(signal.SIGINT)

        asyncio.run(begin())
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
def vllm(here, monkeypatch):
    """A stand-in for the program `vllm`: writes its arguments and its child's pid, and waits."""
    program = here / "vllm"
    program.write_text('#!/bin/sh\nsleep 300 & echo "$! $@" > started\n[ -f fails ] && exit 3\nwait\n')
    program.chmod(0o755)
    monkeypatch.setattr(vllm_server, "_program", lambda: str(program))


def ends(pid):
    """Whether a process ends within two seconds."""
    until = time.monotonic() + 2
    while time.monotonic() < until and psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    return time.monotonic() < until


def test_vllm_gets_the_model_and_leaves_nothing(here, vllm, monkeypatch):
    def interrupt():
        while not (here / "started").exists():
            time.sleep(0.02)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    serve_vllm(here / "models/chat", "tiny", "127.0.0.1", 8123, trust_remote_code=True)
    thread.join()
    child, *arguments = (here / "started").read_text().split()
    expected = f"serve {here}/models/chat --served-model-name tiny --host 127.0.0.1 --port 8123 --trust-remote-code"
    assert arguments == expected.split()
    assert ends(int(child))

    (here / "fails").touch()
    with pytest.raises(EngineError, match="vllm serve ended with exit code 3; see what it printed"):
        serve_vllm(here / "models/chat", "tiny", "127.0.0.1", 8123, trust_remote_code=False)
    monkeypatch.setattr(vllm_server, "_program", lambda: None)
    with pytest.raises(ConfigError, match="--engine vllm: vLLM is not installed here; pip install"):
        serve_vllm(here / "models/chat", "tiny", "127.0.0.1", 8123, trust_remote_code=False)
