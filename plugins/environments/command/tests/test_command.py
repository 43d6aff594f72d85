"""Programs as agents, in real processes, against a small server of OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from types import SimpleNamespace

import attrs
import psutil
import pytest

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import EnvironmentContext
from cosmos_core.types import Message, Prompt
from cosmos_environment_command import plugin
from cosmos_environment_command.plugin import Command, CommandOptions, cosmos_environment, row_of

CONTEXT = EnvironmentContext(name="command", seed=0)
CHAT = Prompt(text=(Message(role="user", content="hi"),), reference=3, metadata={"level": 2})


SESSION = SimpleNamespace(variables={"OPENAI_BASE_URL": "http://model/v1", "OPENAI_API_KEY": "k"})


def run(code, task=CHAT, **options):
    made = Command(CommandOptions(command=(sys.executable, "-c", code), **options), CONTEXT)
    return asyncio.run(made.run(SESSION, task))


def test_a_program_is_given_the_row_and_where_the_model_is(tmp_path):
    code = "import json, os, sys; json.dump([json.load(sys.stdin), dict(os.environ), os.getcwd()], open('got', 'w'))"
    assert run(code, directory=str(tmp_path), variables={"MORE": "1"}) is None
    row, variables, where = json.loads((tmp_path / "got").read_text())
    assert row == {
        "messages": [{"role": "user", "content": "hi"}],
        "reference": 3,
        "media": [],
        "metadata": {"level": 2},
    }
    assert [variables[name] for name in (*SESSION.variables, "MORE")] == [*SESSION.variables.values(), "1"]
    assert where == str(tmp_path)
    assert row_of(Prompt(text="2+2"))["text"] == "2+2"


def test_its_last_line_is_its_reward_where_that_is_wanted():
    assert run("print('thinking'); print(0.25)", reward=True) == 0.25
    # It need not read its input, however long that is.
    assert run("print(1)", task=attrs.evolve(CHAT, metadata={"a": "x" * 1_000_000}), reward=True) == 1.0
    for words in ("well", "nan", ""):
        with pytest.raises(
            DataError, match=rf"the last line that the program printed is '{words}', and environment.opt"
        ):
            run(f"print({words!r})", reward=True)


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_program_has_ended_whatever_it_has_left_running(is_apart, tmp_path, monkeypatch):
    monkeypatch.setattr(plugin, "_REST_S", 0.5)
    started = f"subprocess.Popen(['sleep', '30'], start_new_session={is_apart}).pid"
    code = f"import subprocess; open({str(tmp_path / 'pid')!r}, 'w').write(str({started})); print(0.5)"
    began = time.monotonic()
    try:
        assert run(code, reward=True) == 0.5
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 9)
    assert time.monotonic() - began < 15


def test_a_program_that_fails_says_why():
    with pytest.raises(DataError, match=r"ended with exit code 3: boom$"):
        run("import sys; sys.stderr.write('boom'); sys.exit(3)")
    with pytest.raises(DataError, match="ended with exit code 4: it printed nothing"):
        run("raise SystemExit(4)")
    # Of endless output the end is kept.
    with pytest.raises(DataError, match=r"ended with exit code 5: x{300}$"):
        run("import sys; print('x' * 10_000_000); sys.exit(5)")


def test_a_program_that_is_cancelled_leaves_nothing(tmp_path):
    child = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    )
    code = f"{child} open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(60)"

    async def cancelled():
        made = Command(CommandOptions(command=(sys.executable, "-c", code)), CONTEXT)
        running = asyncio.ensure_future(made.run(SESSION, CHAT))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(cancelled())
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_what_there_is_not_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no program 'no-such-thing' here"):
        Command(CommandOptions(command=("no-such-thing",)), CONTEXT)
    (tmp_path / "agent.sh").touch()
    for options, words in [
        ({"directory": "nowhere"}, "directory: there is no folder 'nowhere' here"),
        ({"directory": str(tmp_path)}, "command: there is no program './agent.sh' here"),
        ({}, "command: there is no program './agent.sh' here"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Command(CommandOptions(command=("./agent.sh",), **options), CONTEXT)
    (tmp_path / "agent.sh").chmod(0o700)
    Command(CommandOptions(command=("./agent.sh",), directory=str(tmp_path)), CONTEXT)
    with pytest.raises(ValueError, match="command"):
        CommandOptions(command=())
    assert cosmos_environment().capabilities.calls_model
