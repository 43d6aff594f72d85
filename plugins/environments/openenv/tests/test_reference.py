"""Against the real `openenv-core`, in an environment of its own."""

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from cosmos_core.config.structure import structure
from cosmos_core.errors import CosmosError
from cosmos_core.protocols import EnvironmentContext
from cosmos_core.types import Prompt
from cosmos_environment_openenv.plugin import OpenEnvOptions, cosmos_environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
# Without gradio and what its command line needs, which a server without a page does without: 340 MB.
PACKAGES = (["--no-deps", "openenv-core==0.3.0"], ["fastapi", "uvicorn", "websockets", "requests", "fastmcp"])


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    for packages in PACKAGES:
        command = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--retries", "1", *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
        if done.returncode != 0 and re.search("connection broken by|ConnectionError|ConnectTimeout", done.stderr):
            pytest.skip(f"no package index can be reached: {done.stderr.splitlines()[0]:.200}")
        assert done.returncode == 0, done.stderr[-4000:]
    return folder / "bin" / "python"


@pytest.fixture
def servers(python):
    """Two servers, by address."""
    with contextlib.ExitStack() as stack:
        started = {}
        for _ in range(2):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [python, Path(__file__).with_name("reference.py"), str(port)]
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
            started[f"http://127.0.0.1:{port}"] = process
        for url, process in started.items():
            while not healthy(url):
                assert process.poll() is None
                time.sleep(0.1)
        yield started


def healthy(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def made(urls, create=None, **options):
    given = {"urls": [*urls], "observation": "{observation.message} {observation.steps}", **options}
    return (create or cosmos_environment().create)(
        structure(given, OpenEnvOptions), EnvironmentContext(name="o", seed=0)
    )


def test_a_dialogue_with_the_real_server_goes_on_when_it_is_killed(servers):
    async def episode():
        environment = made(servers, deterministic=True, reset={"task": "{metadata.task}"})
        words = await environment.reset(Prompt(text="Say it.", metadata={"task": 7}), 3)
        turns = [await environment.step(text) for text in ('{"message": "one"}', '{"massage": "two"}')]
        await asyncio.sleep(2.5)  # the server has pinged
        servers[environment._url].kill()
        turns += [await environment.step(text) for text in ('{"message": "two", "times": 2}', '{"message": "end"}')]
        await environment.close()
        return words, [(turn.observation, turn.reward, turn.done) for turn in turns]

    words, turns = asyncio.run(episode())
    assert words == "ready 3 7 0"
    assert turns == [
        ("one 1", 3.0, False),
        ("no action: message: Field required; massage: Extra inputs are not permitted\n", 0.0, False),
        ("twotwo 2", 6.0, False),
        ("end 3", 3.0, True),
    ]


def test_what_the_real_server_says_is_wrong_is_told(servers):
    async def episode(*turns, kill=False, **options):
        async with contextlib.AsyncExitStack() as stack:
            environment = made(servers, **options)
            stack.push_async_callback(environment.close)
            await environment.reset(Prompt(text="Say it."), 3)
            for turn in turns:
                await environment.step(turn)
            if kill:
                servers[environment._url].kill()
            return await environment.step('{"message": "last"}')

    with pytest.raises(CosmosError, match="EXECUTION_ERROR: it failed"):
        asyncio.run(episode('{"message": "fail"}'))
    refusals = ["EXECUTION_ERROR", "VALIDATION_ERROR"]
    assert asyncio.run(episode('{"message": "fail"}', refusals=refusals)).observation == "last 1"
    # openenv-core 0.3.0 cannot tell what a validator of an action's class says, and ends the session.
    with pytest.raises(CosmosError, match="SESSION_ERROR: Unable to serialize"):
        asyncio.run(episode('{"message": "one", "times": 9}'))
    with pytest.raises(CosmosError, match=r"HTTP 403 in place of a WebSocket; give the address"):
        asyncio.run(made([f"{next(iter(servers))}/elsewhere"]).reset(Prompt(text=""), 0))
    with pytest.raises(CosmosError, match=r"its episode is gone with it. If the same seed and actions"):
        asyncio.run(episode('{"message": "one"}', kill=True))


def test_the_real_server_is_asked_again_while_it_is_full(servers):
    async def many():
        create = cosmos_environment().create
        episodes = [made(servers, create) for _ in range(4)]
        await asyncio.gather(*(each.reset(Prompt(text=""), 0) for each in episodes))
        late, never = made(servers, create), made(servers, create, full_s=0.5)
        with pytest.raises(CosmosError, match="Server at capacity: 2/2 sessions active"):
            await never.reset(Prompt(text=""), 0)
        waiting = asyncio.ensure_future(late.reset(Prompt(text=""), 0))
        await asyncio.sleep(0.3)
        await episodes[0].close()
        assert await waiting == "ready 0 None 0"
        await asyncio.gather(*(each.close() for each in (*episodes, late, never)))

    asyncio.run(many())
