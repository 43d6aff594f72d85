"""The agent against a server that says what a script says, in the real sandbox."""

import asyncio
import contextlib
import json
import os
import socket
import time

import openai
import psutil
import pytest
from aiohttp import web

from cosmos_core.errors import DataError, PluginError
from cosmos_core.protocols import EnvironmentContext
from cosmos_core.types import Message, Prompt
from cosmos_environment_code_agent.plugin import CodeAgent, CodeAgentOptions
from cosmos_environment_code_agent.tasks import task_of
from cosmos_environment_code_agent.workspace import Workspace

FAULTY = "def add(a, b):\n    return a - b"
MENDED = "def add(a, b):\n    return a + b"
REFERENCE = {
    "source": FAULTY,
    "examples": [["add(2, 3)", "5"]],
    "tests": [
        ["add(1, 1)", "2"],
        ["add(4, 0)", "4"],
        ["add('a', 'b')", "'ab'"],
        ["add(1, None)", "TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'"],
    ],
}


def call(name, arguments):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": text}}


class Server:
    """Answers with the script's turns in order: a text, calls of tools, or a refusal."""

    def __init__(self, *script):
        self.script, self.asked = list(script), []

    async def answer(self, request):
        self.asked.append(await request.json())
        said = self.script.pop(0)
        if isinstance(said, web.Response):
            return said
        calls = [] if isinstance(said, str) else said
        message = {"role": "assistant", "content": said if isinstance(said, str) else ""}
        message |= {"tool_calls": calls} if calls else {}
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    @property
    def observations(self):
        """What the tools answered."""
        return [each["content"] for each in self.asked[-1]["messages"] if each["role"] == "tool"]


@contextlib.asynccontextmanager
async def session_of(server):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    client = openai.AsyncOpenAI(api_key="k", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
    try:
        yield type("Session", (), {"client": client, "model": "m"})()
    finally:
        await client.close()
        await runner.cleanup()


def agent_of(**options):
    return CodeAgent(CodeAgentOptions(**options), EnvironmentContext(name="code-agent", seed=0))


def repaired(server, reference=None, text="Repair it.", **options):
    """The reward of a session, after which no process is left."""

    async def play():
        async with session_of(server) as session:
            task = Prompt(text=text, reference=REFERENCE if reference is None else reference)
            return await agent_of(**options).run(session, task)

    before = set(psutil.Process().children(recursive=True))
    try:
        return asyncio.run(play())
    finally:
        assert set(psutil.Process().children(recursive=True)) <= before


def test_a_function_is_repaired_with_both_tools():
    server = Server([call("run", {"code": "print(add(2, 3))"})], [call("write", {"source": MENDED})], "It adds, now.")
    assert repaired(server) == 1.0
    assert server.observations == ["-1\n", "all examples pass"]
    first = server.asked[0]
    assert first["messages"] == [{"role": "user", "content": "Repair it."}]
    assert [each["function"]["name"] for each in first["tools"]] == ["run", "write"]
    assert not any(value in json.dumps(server.asked) for _, value in REFERENCE["tests"][2:])


def test_the_share_of_hidden_tests_that_pass_is_the_reward(subtests):
    for script, reward in [
        (["I see nothing wrong."], 0.25),
        ([[call("write", {"source": "def add(a, b): return 2"})], "Done."], 0.25),
        ([[call("write", {"source": "def add(a, b): return a + b or exit()"})], "Done."], 1.0),
        ([[call("write", {"source": "exit()"})], "Done."], 0.0),
        ([[call("write", {"source": "def add(a, b): return (a"})], "Done."], 0.0),
        ([[call("write", {"source": "def add(a, b): return a + b\nrepr = print = None"})], "Done."], 1.0),
    ]:
        with subtests.test(script=script):
            assert repaired(Server(*script)) == reward
    server = Server([call("write", {"source": "def add(a, b): return (a"})], "Done.")
    repaired(server)
    assert server.observations == ["add(2, 3): SyntaxError: '(' was never closed"]


def test_what_is_wrong_with_a_call_is_its_answer_and_the_call_is_used_up(subtests):
    for made, words in [
        (call("edit", {}), "error: there is no tool 'edit', but run, write"),
        (call("write", '{"source": '), "error: the arguments of write are no JSON: Expecting value"),
        (call("write", {"text": MENDED}), 'error: write takes {"source": TEXT}, not {"text": "def add'),
        (call("run", [1]), 'error: run takes {"code": TEXT}, not [1]'),
        (call("run", {"code": 1}), 'error: run takes {"code": TEXT}, not {"code": 1}'),
        (call("run", {"code": "x" * 9, "source": ""}), 'error: run takes {"code": TEXT}'),
        (call("run", {"code": "1 +"}), "SyntaxError: invalid syntax"),
        (call("run", {"code": "\ud800"}), "SyntaxError"),
        (call("run", {"code": "1"}), "nothing was printed"),
    ]:
        with subtests.test(made=made):
            server = Server([made], [call("write", {"source": MENDED})], "Done.")
            assert repaired(server) == 1.0
            assert server.observations[0].startswith(words)
    server = Server([call("edit", {})], [call("write", {"source": MENDED})])
    assert repaired(server, max_calls=1) == 0.25
    assert len(server.asked) == 1
    server = Server([call("run", {"code": "1"})], "Done.")
    assert repaired(server, run=False) == 0.25
    assert server.observations == ["error: there is no tool 'run', but write"]
    assert [each["function"]["name"] for each in server.asked[0]["tools"]] == ["write"]
    both = Server([call("write", {"source": MENDED}), call("write", {"source": FAULTY})])
    assert repaired(both, max_calls=1) == 1.0


def test_what_a_program_may_not_do_ends_it_alone(subtests, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("for others")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for code, words in [
            ("while True: print('x' * 99)", "[ended: output limit]"),
            ("import time; print(1, flush=True); time.sleep(99)", "1\n[ended: time limit]"),
            (f"import socket; socket.create_connection(('127.0.0.1', {port}))", "PermissionError"),
            (f"print(open({str(secret)!r}).read())", "PermissionError"),
            (f"open({str(tmp_path / 'new')!r}, 'w')", "PermissionError"),
            ("import os; os.system('true'); os.fork()", "PermissionError"),
            ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
            ("import os; print(sorted(os.environ))", "['LANG', 'PYTHONHASHSEED', 'PYTHONUTF8']\n"),
            ("x = 'x' * (1 << 30)", "MemoryError"),
            ("import os; os.abort()", "[ended with -6]"),
            ("print('\\0' * 700_000)", "\0" * 199),
        ]:
            with subtests.test(code=code):
                server = Server([call("run", {"code": code})], [call("write", {"source": MENDED})], "Done.")
                assert repaired(server, time_s=1.0, output_kb=1024, shown_characters=200) == 1.0
                assert words in server.observations[0]
                assert len(server.observations[0]) <= 200
        assert not (tmp_path / "new").exists()
        other.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.accept()


def test_tests_that_do_not_end_do_not_pass():
    endless = "def add(a, b):\n    while a == 4: pass\n    return a + b"
    began = time.monotonic()
    assert repaired(Server([call("write", {"source": endless})], "Done."), time_s=1.0) == 0.25
    assert time.monotonic() - began < 20.0


def test_sessions_that_go_on_at_once_share_nothing():
    async def play():
        servers = [Server([call("write", {"source": each})], "Done.") for each in (MENDED, FAULTY) * 4]
        async with contextlib.AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(session_of(each)) for each in servers]
            task = Prompt(text="Repair it.", reference=REFERENCE)
            return await asyncio.gather(*(agent_of().run(session, task) for session in sessions))

    assert asyncio.run(play()) == [1.0, 0.25] * 4


def test_a_session_at_its_limit_is_scored_and_any_other_refusal_is_an_error():
    def refusal(code):
        return web.json_response({"error": {"message": "no", "type": "x", "code": code}}, status=400)

    for code in ("context_length_exceeded", "max_turns"):
        assert repaired(Server([call("write", {"source": MENDED})], refusal(code))) == 1.0
    with pytest.raises(openai.BadRequestError):
        repaired(Server(refusal("invalid_request")))


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "while True: pass"])
def test_a_cancelled_agent_leaves_no_process(code):
    async def play():
        async with session_of(Server([call("run", {"code": code})])) as session:
            task = Prompt(text=(Message(role="user", content="Repair it."),), reference=REFERENCE)
            running = asyncio.ensure_future(agent_of(time_s=60.0).run(session, task))
            while len(started := set(psutil.Process().children(recursive=True)) - before) < 2:  # noqa: ASYNC110 - processes tell of no event
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return started

    before = set(psutil.Process().children(recursive=True))
    _, alive = psutil.wait_procs(asyncio.run(play()), timeout=5)
    assert alive == []


def test_a_sandbox_that_ends_by_itself_is_an_error():
    async def play():
        async with Workspace(FAULTY, agent_of()._limits) as workspace:
            os.kill(workspace._process.pid, 9)
            for size in (1, 1 << 22):
                with pytest.raises(PluginError, match="the sandbox has ended by itself"):
                    await workspace.run("1" * size)

    asyncio.run(play())


def test_a_reference_that_is_no_task_is_refused(subtests):
    for change, words in [
        ({"source": 1}, "is no task; give .*source"),
        ({"more": 1}, "is no task"),
        ({"tests": []}, "no tests, so that nothing could be scored"),
        ({"tests": "add(1, 1) == 2"}, "tests of the reference are 'add.1, 1. == 2'; give a list"),
        (
            {"tests": [["add(1, 1)", 2]]},
            r"tests of the reference have \['add.1, 1.', 2\]; give .CALL, VALUE",
        ),
        ({"examples": [["add(1", "2"]]}, r"examples of the reference call 'add\(1', no expression .*never closed"),
        ({"examples": [["x = 1", "2"]]}, "no expression"),
    ]:
        with subtests.test(change=change), pytest.raises(DataError, match=words):
            repaired(Server(), reference={**REFERENCE, **change})
    with pytest.raises(DataError, match="the reference 'x' is no task"):
        task_of("x")


def test_bad_options_are_refused(subtests):
    for options in [
        {"max_calls": 0},
        {"time_s": 0.0},
        {"memory_mb": 1},
        {"output_kb": 0},
        {"shown_characters": 0},
    ]:
        with subtests.test(options=options), pytest.raises(ValueError, match=next(iter(options))):
            CodeAgentOptions(**options)
