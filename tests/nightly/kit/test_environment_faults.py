"""Wrong environments, each of which the kit must name."""

import pytest

from tests.nightly.kit.outcomes import unnamed, wrong

ENVIRONMENT = """
import asyncio, os, random, subprocess, time
from cosmos_core.protocols import EnvironmentCapabilities, Provider, Turn, hookimpl

SEEN = []

class Environment:
    def __init__(self, options, context):
        self.turns = 0

    async def reset(self, prompt, seed):
{reset}

    async def step(self, text):
        self.turns += 1
{step}

    async def close(self):
{close}

@hookimpl
def cosmos_environment():
    return Provider(create=Environment, capabilities=EnvironmentCapabilities({capabilities}))
"""
HEADER = "from cosmos_core.types import Prompt\n"
EXAMPLES = 'examples = [(Prompt(text="?"), ["a", "b"], ["1", "2"])]'


def environment(*step, reset=("self.seed = seed",), close=("pass",), capabilities=""):
    """An environment whose methods are these lines; without any, a turn is answered with its number."""
    parts = {"reset": reset, "step": step or ("return Turn(observation=str(self.turns))",), "close": close}
    lines = {name: "\n".join(f"        {line}" for line in body) for name, body in parts.items()}
    return ENVIRONMENT.format(**lines, capabilities=capabilities)


GOOD = {
    "counts": environment(),
    "greets": environment(reset=("return f'Hello {seed}. '",)),
    "pays": environment("return Turn(done=True, reward=0.5)", capabilities="rewards=True"),
    "tosses": environment("return Turn(observation=str(random.random()))", capabilities="deterministic=False"),
    "draws-from-its-seed": environment(
        "return Turn(observation=str(self.random.random()))", reset=("self.random = random.Random(seed)",)
    ),
    "starts-a-process": environment(
        reset=("self.child = subprocess.Popen(['sleep', '64'])",),
        close=("self.child.terminate()", "await asyncio.to_thread(self.child.wait)"),
    ),
    "is-a-tool": environment("return Turn(observation='.', role='tool')"),
    "waits": environment("await asyncio.to_thread(time.sleep, 0.02)", "return Turn(observation='.')"),
}
PLANTED = {
    "raises": (
        environment("return Turn(observation=str(int(text)))"),
        "test_every_ordinary_input_is_answered_in_time",
        "ordinary dialogues failed:",
        "the dialogue of '#### 1904': ValueError: invalid literal for int()",
    ),
    "cannot-begin": (
        environment(reset=("return prompt.text + '!'",)),
        "test_every_ordinary_input_is_answered_in_time",
        "1 of 9 ordinary dialogues failed:",
        "TypeError: can only concatenate tuple",
    ),
    "says-nothing": (
        environment("return Turn()"),
        "test_every_ordinary_input_is_answered_in_time",
        "step: it returned no observation, and the dialogue is not done",
    ),
    "says-numbers": (
        environment("return Turn(observation=7)"),
        "test_every_ordinary_input_is_answered_in_time",
        "step: the observation is no text but 7",
    ),
    "speaks-for-the-model": (
        environment("return Turn(observation='#### 8', role='assistant')"),
        "test_every_ordinary_input_is_answered_in_time",
        "step: the role is 'assistant'; name whose turn the observation is, such as 'user' or 'tool', not the model",
    ),
    "pays-with-nan": (
        environment("return Turn(observation='.', reward=float('nan'))", capabilities="rewards=True"),
        "test_every_ordinary_input_is_answered_in_time",
        "step: the reward is no finite number but nan",
    ),
    "awaits-what-was-cancelled": (
        environment("task = asyncio.ensure_future(asyncio.sleep(9))", "task.cancel()", "await task"),
        "test_every_ordinary_input_is_answered_in_time",
        "the dialogue of '#### 1904': CancelledError (",
    ),
    "ends-the-process": (
        environment("return Turn(done=True) if text else os._exit(3)"),
        "test_every_ordinary_input_is_answered_in_time",
        "the process of this episode ended while it had its turn (exit code 3)",
    ),
    "hangs": (
        environment("while not text:", "    time.sleep(0.01)", "return Turn(done=True)"),
        "test_every_ordinary_input_is_answered_in_time",
        "the dialogue of '' got no answer within 2 s",
    ),
    "waits-for-ever": (
        environment("await asyncio.sleep(0 if text else 1000)", "return Turn(done=True)"),
        "test_every_ordinary_input_is_answered_in_time",
        "the dialogue of '' got no answer within 2 s",
    ),
    "leaves-a-process": (
        environment("return Turn(done=True)", reset=("subprocess.Popen(['sleep', '63'])",)),
        "test_every_ordinary_input_is_answered_in_time",
        "it starts processes that outlive the worker; wait for their end:\n  sleep 63",
    ),
    "blocks": (
        environment("time.sleep(0 if text else 3)", "return Turn(done=True)"),
        "test_dialogues_do_not_disturb_each_other",
        "the dialogue of '' held up the event loop, and all other dialogues of the worker, for 3.",
    ),
    "leaves-a-task": (
        environment(reset=("asyncio.ensure_future(self.idle())",)).replace(
            "    async def step", "    async def idle(self):\n        await asyncio.sleep(1000)\n\n    async def step"
        ),
        "test_dialogues_do_not_disturb_each_other",
        "tasks go on after `close`: Environment.idle",
    ),
    "changes-the-row": (
        environment(reset=("prompt.metadata['tags'].append('played')",)),
        "test_dialogues_do_not_disturb_each_other",
        "the dialogue of '#### 1904' changed its row; work on a copy",
    ),
    "shares-its-state": (
        environment(
            "SEEN.append(text)",
            "return Turn(observation='.', media=(f'{len(SEEN)}.png',))",
            reset=("SEEN.clear()",),
        ),
        "test_dialogues_do_not_disturb_each_other",
        "keep the state of a dialogue in its own instance",
    ),
    "hash": (
        environment("return Turn(observation=str(hash(text)))"),
        "test_another_process_gives_the_same_answers",
        "draw from the seed that `reset` is given, or declare EnvironmentCapabilities(deterministic=False)",
    ),
    "pays-in-secret": (
        environment("return Turn(done=True, reward=0.5)"),
        "test_rewards_are_declared",
        "the dialogue of '#### 1904' got a reward of 0.5, which no run would count",
    ),
    "wrong-example": (
        environment("return Turn(observation=str(self.turns + 1))"),
        "test_the_examples_get_their_answers",
        "the dialogue of 'a' got ['2', '3'], and `examples` says ['1', '2']",
    ),
}
BODIES = {
    **dict.fromkeys(("counts", "wrong-example"), EXAMPLES),
    **dict.fromkeys(("hangs", "waits-for-ever"), "timeout_s = 2.0"),
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = GOOD | {name: source for name, (source, *_) in PLANTED.items()}
    return run_kit("environment", modules, header=HEADER, bodies=BODIES)


def test_good_environments_pass(outcomes):
    assert wrong(outcomes, GOOD) == {}


def test_each_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}
