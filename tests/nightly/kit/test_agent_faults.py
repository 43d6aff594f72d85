"""Wrong agents, each of which the kit must name."""

import pytest

from tests.nightly.kit.outcomes import unnamed, wrong

AGENT = """
import asyncio, json, os, random, subprocess, sys, time, urllib.request
from cosmos_core.protocols import EnvironmentCapabilities, Provider, hookimpl

SEEN = []

def post(session, path, body):
    headers = {{"Content-Type": "application/json"}}
    request = urllib.request.Request(session.base_url.removesuffix("v1") + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)

def ask(session, words):
    body = {{"model": session.model, "messages": [{{"role": "user", "content": words}}]}}
    return post(session, "v1/chat/completions", body)["choices"][0]["message"]["content"]

class Agent:
    def __init__(self, options, context): ...

    async def said(self, session, words="?"):
        return await asyncio.to_thread(ask, session, words)

    async def idle(self):
        await asyncio.sleep(1000)

    {run} run(self, session, task):
{body}

@hookimpl
def cosmos_environment():
    return Provider(create=Agent, capabilities=EnvironmentCapabilities({capabilities}))
"""
ENDS, TURNS = "test_every_ordinary_input_is_answered_in_time", "test_tasks_do_not_disturb_each_other"


def agent(*body, run="async def", capabilities="calls_model=True"):
    """An agent whose `run` is these lines, after which it asks once."""
    lines = (*body, "await self.said(session)") if run == "async def" else body
    return AGENT.format(run=run, body="\n".join(f"        {line}" for line in lines), capabilities=capabilities)


def pays(reward, *, rewards=True):
    return agent("await self.said(session)", f"return {reward}", capabilities=f"calls_model=True, rewards={rewards}")


GOOD = {
    "asks": agent(),
    "is-a-function": agent("ask(session, '?')", run="def"),
    "pays": pays(1),
    "goes-on-until-it-is-refused": agent("while True: await self.said(session)"),
    "imports-slowly": agent("SEEN or time.sleep(2.5)", "SEEN.append(1)"),
    "ends-its-process": agent("child = subprocess.Popen(['sleep', '64'])", "child.kill()", "child.wait()"),
}
PLANTED = {
    "never-calls": (
        agent("return"),
        "test_an_agent_calls_the_model",
        "the task in which the model says '' ended without a call of the model",
    ),
    "only-pays": (
        agent("await asyncio.to_thread(post, session, 'reward', {'reward': 1})", "return"),
        "test_an_agent_calls_the_model",
        "ended without a call of the model",
    ),
    "raises": (
        agent("int(await self.said(session) or 0)"),
        ENDS,
        "of 7 ordinary tasks failed:",
        "the task in which the model says '{",
        "ValueError: invalid literal for int()",
    ),
    "ends-the-process": (agent("await self.said(session) or os._exit(3)"), ENDS, "(exit code 3)"),
    "waits-for-ever": (agent("await self.said(session) or await self.idle()"), ENDS, "got no answer within 3 s"),
    "goes-on-though-it-is-refused": (
        agent("while True:", "    try: await self.said(session)", "    except OSError: await asyncio.sleep(0.1)"),
        ENDS,
        "the task in which the model says '' got no answer within 3 s",
    ),
    "leaves-a-process": (
        agent("subprocess.Popen(['sleep', '63'])"),
        ENDS,
        "it starts processes that outlive the worker; wait for their end:\n  sleep 63",
    ),
    "blocks": (
        agent("await self.said(session) or time.sleep(2.2)"),
        TURNS,
        "the task in which the model says '' held up the event loop, and all other agents of the worker, for 2.",
    ),
    "has-a-client-that-blocks": (agent("ask(session, '?')"), TURNS, "such as a client that is not async, into"),
    "leaves-a-task": (agent("asyncio.ensure_future(self.idle())"), TURNS, "tasks go on after `run`: Agent.idle"),
    "changes-the-row": (
        agent("task.metadata['tags'].append('done')"),
        TURNS,
        "the task in which the model says '' changed its row; work on a copy",
    ),
    "tosses": (
        agent("await self.said(session, str(random.random()))"),
        "test_another_process_gives_the_same_answers",
        "draw from the seed of the session, or declare EnvironmentCapabilities(deterministic=False)",
    ),
    "shares-its-state": (
        agent("SEEN.append(1)", "await self.said(session, str(len(SEEN)))"),
        "test_another_process_gives_the_same_answers",
        "in another order",
    ),
    "pays-in-secret": (
        pays(1, rewards=False),
        "test_rewards_are_declared",
        "gave a reward; declare EnvironmentCapabilities(rewards=True)",
    ),
    "tells-a-reward-in-secret": (
        agent("await asyncio.to_thread(post, session, 'v1/reward', {'reward': 1, 'reply': 'chatcmpl-1'})"),
        "test_rewards_are_declared",
        "gave a reward; declare EnvironmentCapabilities(rewards=True)",
    ),
    "does-not-say-what-it-is": (
        agent(capabilities=""),
        "test_rewards_are_declared",
        "declare EnvironmentCapabilities(calls_model=True)",
    ),
}
SHORT = ("waits-for-ever", "goes-on-though-it-is-refused")


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = GOOD | {name: source for name, (source, *_) in PLANTED.items()}
    bodies = dict.fromkeys(SHORT, "timeout_s = 3.0")
    return run_kit("environment", modules, bodies=bodies, kit="AgentConformance")


def test_good_agents_pass(outcomes):
    assert wrong(outcomes, GOOD) == {}


def test_each_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}
