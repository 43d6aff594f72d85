"""The service, over real sockets, and the server that comes with it in a process of its own."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from cosmos_core.errors import PluginError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Message, Prompt, ToolCall
from cosmos_reward_remote.protocol import completions_of, request_of
from cosmos_reward_remote.service import Service, ServiceOptions


def score(url, *texts, references=None, **options):
    async def all_of_them():
        service = Service(ServiceOptions(url=url, **{"backoff_s": 0.01, **options}), RewardContext(name="mine", seed=0))
        service.load()
        prompts = [Prompt(text="?", reference=each) for each in references or [None] * len(texts)]
        completions = [Completion(prompt=prompt, text=text) for prompt, text in zip(prompts, texts, strict=True)]
        return await asyncio.gather(*map(service.score, completions), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_completions_go_in_batches_and_scores_come_back_in_order(standin):
    scored = score(f"{standin.url}/score", *("x" * n for n in range(10)), batch=4)
    assert [each.value for each in scored] == [float(n) for n in range(10)]
    assert sorted(len(body["completions"]) for *_, body, _ in standin.requests) == [2, 4, 4]
    assert scored[0].details == {"n": 1}


def test_the_request_says_everything_of_a_completion():
    call = ToolCall(name="add", arguments='{"x":  1}', id="c1")
    completion = Completion(
        prompt=Prompt(
            text=(Message(role="user", content="?"),),
            reference={"a": [1, None]},
            metadata={"source": "here"},
            tools=({"type": "function", "function": {"name": "add"}},),
        ),
        text="x",
        turns=(
            Message(role="assistant", content="", tool_calls=(call,), reasoning="Hm."),
            Message(role="tool", content="1", tool_call_id="c1"),
        ),
        truncated=True,
        num_units=3,
    )
    (read,) = completions_of(request_of([completion]))
    for name in ("prompt", "text", "turns", "truncated", "num_units"):
        assert getattr(read, name) == getattr(completion, name)


def test_an_answer_that_cannot_be_used_fails_every_completion_of_it(standin, subtests):
    for path, message in [
        ("too-few", "2 scores for 3 completions"),
        ("too-many", "6 scores for 3 completions"),
        ("no-scores", "the answer has no list of scores: {'score': 1}"),
        ("a-list", "the answer has no list of scores: [1]"),
        ("nan", "neither a finite number nor an error: {'value': nan}"),
        ("huge", "neither a finite number nor an error"),
        ("truth", "neither a finite number nor an error: {'value': True}"),
        ("bare", "neither a finite number nor an error: 1.0"),
        ("odd-details", "neither a finite number nor an error"),
        ("garbage", "an answer that is no JSON"),
        ("silent", "no answer within 0.5 s"),
    ]:
        with subtests.test(path=path, message=message):
            timeout_s = 0.5 if path == "silent" else 30.0
            errors = score(f"{standin.url}/{path}", "a", "b", "c", batch=3, request_timeout_s=timeout_s, retries=0)
            assert {type(each) for each in errors} == {PluginError}
            assert all(message in str(each) and str(each).startswith("reward mine: ") for each in errors)


def test_what_was_not_answered_in_time_is_not_asked_again(standin):
    (error,) = score(f"{standin.url}/silent", "a", request_timeout_s=0.5, retries=3)
    assert "no answer within 0.5 s" in str(error)
    assert standin.num_requests(1) == 1


def test_an_error_is_of_its_completion_alone(standin):
    first, second, third = score(f"{standin.url}/some", "a", "bad", "c")
    assert (first.value, third.value) == (2.0, 2.0)
    assert "the service has no score: no idea" in str(second)


@contextlib.contextmanager
def serving(name, options, *arguments):
    """An installed reward as a service; gives its address."""
    command = [sys.executable, "-m", "cosmos_reward_remote.server", name, "--options", options, *arguments]
    environment = {**os.environ, "SERVICE_KEY": "k"}
    with contextlib.ExitStack() as stack:
        # Bound and not listened on: nobody but who asks for it by number has the port.
        reserved = stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        process = stack.enter_context(
            subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=subprocess.DEVNULL)
        )
        for _ in range(400):
            with socket.socket() as probe:
                if process.poll() is not None or probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/score"
        process.send_signal(signal.SIGINT)
        process.wait(10)


@pytest.fixture(scope="module")
def server():
    """`math` as a service, for those with the key."""
    with serving("math", '{"mode": "final-number"}', "--key-variable", "SERVICE_KEY") as url:
        yield url


def test_any_reward_is_served_and_what_fails_fails_alone(server, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "k")
    right, wrong, failed = score(
        server, "#### 8", "#### 9", "#### 8", references=["8", "8", None], key_variable="SERVICE_KEY"
    )
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert "DataError: reward math, mode final-number: the reference None is no number" in str(failed)


def test_the_server_refuses_who_has_no_key_and_what_is_no_request(server, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "stolen")
    (error,) = score(server, "8", key_variable="SERVICE_KEY")
    assert "status 401: 'the key is missing or another one'" in str(error)
    for body in (b"{}", b'{"version": 2, "completions": []}', b"[", b'{"version": 1, "completions": [{}]}', b"1"):
        request = urllib.request.Request(
            server, body, {"Authorization": "Bearer k", "Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == 400
        refused.value.close()


@pytest.mark.nightly
def test_what_nobody_waits_for_is_not_scored():
    pytest.importorskip("cosmos_reward_code")
    slow, quick = "import time; time.sleep(0.7); print(1)", "print(1)"
    reference = {"stdin": "", "stdout": "1"}
    with serving("code", '{"needs_fence": false}') as url:
        errors = score(url, *[slow] * 8, references=[reference] * 8, batch=8, request_timeout_s=0.5)
        assert {type(each) for each in errors} == {PluginError}
        began = time.monotonic()
        (scored,) = score(url, quick, references=[reference])
        assert (scored.value, time.monotonic() - began < 3.0) == (1.0, True)


def test_a_reward_that_is_not_there_is_not_served():
    command = [sys.executable, "-m", "cosmos_reward_remote.server", "maths"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "math" in ended.stderr


def test_an_address_at_which_nothing_listens_is_told_before_a_run(standin):
    def asked(url, **options):
        return Service(ServiceOptions(url=url, **options), RewardContext(name="mine", seed=0)).absent()

    assert asked(f"{standin.url}/score") == ""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/score"
    away = "no connection (Connection refused); start the service, or correct the address"
    assert asked(url) == f"url: {url!r}: {away}"
    (failed,) = score(url, "x", retries=0)
    assert f"{url}: no connection" in str(failed)
    assert "start the service, or correct the address" in str(failed)
