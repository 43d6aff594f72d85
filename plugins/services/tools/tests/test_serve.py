"""A model served to clients of OpenAI's API, over real sockets; and vLLM's own server, of which a script stands in."""

import asyncio
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
import psutil
import pytest
from aiohttp.test_utils import TestServer

from cosmos_core.config.checks import is_loopback
from cosmos_core.errors import ConfigError, EngineError
from cosmos_service_tools import vllm_server
from cosmos_service_tools.answers import speaking
from cosmos_service_tools.server import Service, listen
from cosmos_service_tools.vllm_server import serve_vllm

CHAT = {"messages": [{"role": "user", "content": "3 + 4"}], "temperature": 0, "max_tokens": 12}
TEXT = {"prompt": "3 + 4", "temperature": 0, "max_tokens": 12}


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
        assert "".join(words(choice) for part in parts for choice in part["choices"]) == whole
        assert parts[-2]["choices"][0]["finish_reason"]
        assert parts[-1]["usage"]["completion_tokens"] > 0


def test_what_cannot_be_answered_is_refused_in_a_sentence(ask):
    refusals = [
        (CHAT | {"tools": [{}]}, 400, "tools: this server cannot do that; leave it out, or serve with --engine vllm"),
        (CHAT | {"max_tokens": "x"}, 400, "not a request: Expected `int | null`, got `str` - at `$.max_tokens`"),
        (CHAT | {"beam": 4}, 400, "not a request: Object contains unknown field `beam`"),
        (CHAT | {"messages": []}, 400, "not a request: Expected `array` of length >= 1 - at `$.messages`"),
        (CHAT | {"model": "other"}, 404, "the model 'other' is not served here, but 'tiny'"),
        (CHAT | {"n": 2, "stream": True}, 400, "stream: one answer at a time is streamed, and 2 are asked for"),
        (CHAT | {"messages": [{"role": "user", "content": "3 " * 300}]}, 400, "fill the model's context of 256"),
        (
            {"data": b"{", "headers": {"Content-Type": "application/json"}},
            400,
            "not a request: Input data was truncated",
        ),
        ({"data": b"{}"}, 415, "requests are JSON (Content-Type: application/json)"),
    ]
    replies = ask(*(("/v1/chat/completions", body) for body, _, _ in refusals))
    for (_, status, words), (found, reply) in zip(refusals, replies, strict=True):
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
