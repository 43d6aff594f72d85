"""Wrong rewards, each of which the kit must name."""

import pytest

from tests.nightly.kit.outcomes import unnamed, wrong

REWARD = """
import asyncio, math, os, random, subprocess, sys, time
from cosmos_core.protocols import Provider, RewardCapabilities, Score, hookimpl

class Reward:
    def __init__(self, options, context):
        self.seen = 0

{score}

@hookimpl
def cosmos_reward():
    return Provider(create=Reward, capabilities=RewardCapabilities({capabilities}))
"""
HEADER = """
from cosmos_core.protocols import Completion
from cosmos_core.types import Array, Payload, Prompt

EIGHT, NOTHING = Prompt(text="5 + 3?", reference="8"), Prompt(text="5 + 3?")
"""
TABLES = """
examples = [(Completion(prompt=EIGHT, text="8"), 1.0), (Completion(prompt=EIGHT, text="9"), 0.0)]
unscorable = [Completion(prompt=NOTHING, text="8")]
"""
EXACT = """
        if completion.prompt.reference is None:
            raise ValueError("no reference")
        value = float(completion.text == completion.prompt.reference)
"""

VETS = """
from cosmos_core.errors import DataError

def vet(self, prompt):
    if {condition}:
        raise {error}("no reference")

Reward.vet = vet
"""
LOADS = """
def load(self):
    self.unit = 1.0

Reward.load = load
"""
REQUIRES = """
from cosmos_core.errors import ConfigError

def absent(self):
    return {absent}

def load(self):
    if "REWARD_KEY" not in os.environ:
        {without}

Reward.absent, Reward.load = absent, load
"""
KEYLESS = "'' if 'REWARD_KEY' in os.environ else 'REWARD_KEY is not set'"
REFUSES = "raise ConfigError(self.absent())"
KEY = """
variables = ["REWARD_KEY"]

@pytest.fixture(autouse=True)
def key(self, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "k")
"""
PICTURES = "payload_kinds=frozenset({'media'})"
LATENTS = """
@pytest.fixture
def completions(self):
    frames = [Array(dtype="uint8", shape=(3,), data=memoryview(bytes([number, 1, 2]))) for number in range(3)]
    payloads = [Payload(kind="latents", arrays={"frames": each}) for each in frames]
    return [Completion(prompt=Prompt(text="a ball falls"), text="", payload=each) for each in payloads]
"""


def reward(*lines, capabilities="", head="def score(self, completion):", exact=EXACT):
    """A reward whose `score` is `lines`, which may use `value`, the right score."""
    body = "\n".join(f"        {line}" for line in lines)
    return REWARD.format(score=f"    {head}{exact}{body}", capabilities=capabilities)


GOOD = {
    "returned": reward("return value"),
    "explained": reward("return Score(value=value, details={'length': len(completion.text), 'parts': [1, None]})"),
    "coroutine": reward("await asyncio.sleep(0.01)", "return value", head="async def score(self, completion):"),
    "latents": reward(
        "return float(sum(completion.payload.arrays['frames'].data))",
        capabilities="payload_kinds=frozenset({'latents'})",
        exact="\n",
    ),
    "pictures": reward(
        "if completion.media is None:",
        "    raise ValueError('no frames')",
        "frames = completion.media.arrays['frames']",
        "return sum(bytes(frames.data)) / len(frames.data)",
        capabilities=PICTURES,
        exact="\n",
    ),
    "tossed": reward("return random.random()", capabilities="deterministic=False"),
    "tossed-beside-examples": reward(
        "return 1.0 - random.random() * (completion.prompt.reference is None)",
        capabilities="deterministic=False",
        exact="\n",
    ),
    "judges-without-a-reference": reward(
        "return 0.5 if completion.prompt.reference is None else float(completion.text == '8')", exact="\n"
    ),
    "needs-no-reference": reward("return float(completion.text == '8')", exact="\n"),
    "vets": reward("return value") + VETS.format(condition="prompt.reference is None", error="DataError"),
    "loads": reward("return value / self.unit") + LOADS,
    "requires": reward("return value") + REQUIRES.format(absent=KEYLESS, without=REFUSES),
}
PLANTED = {
    "raises": (
        reward("int(completion.text)", "return value"),
        "test_every_ordinary_input_is_answered_in_time",
        "13 of 13 ordinary completions got no score",
        "the completion 'The answer is 8.' (reference '8'): ValueError: invalid literal for int()",
    ),
    "nan": (
        reward("return value / len(completion.text) if completion.text else math.nan"),
        "test_every_ordinary_input_is_answered_in_time",
        "1 of 13 ordinary completions got no score",
        "the completion '' (reference '8'): the score is not finite: nan",
    ),
    "fails-where-others-speak": (
        reward("(only,) = completion.turns", "return value"),
        "test_every_ordinary_input_is_answered_in_time",
        "1 of 13 ordinary completions got no score",
        "the completion 'calc: 7+5-4=8\\n#### 9' (reference '8'): ValueError: too many values",
    ),
    "none": (
        reward("if completion.truncated:", "    return None", "return value"),
        "test_every_ordinary_input_is_answered_in_time",
        "3 of 13 ordinary completions got no score",
        "the score is no number but None",
    ),
    "ends-the-process": (
        reward("return value if completion.text else os._exit(3)"),
        "test_every_ordinary_input_is_answered_in_time",
        "the reward's process ended (exit code 3)",
    ),
    "hangs": (
        reward("while not completion.text:", "    time.sleep(0.01)", "return value"),
        "test_every_ordinary_input_is_answered_in_time",
        "the completion '' (reference '8') got no answer within 2 s",
    ),
    "leaves-a-process": (
        reward("subprocess.Popen(['sleep', '61'])", "return value"),
        "test_every_ordinary_input_is_answered_in_time",
        "it starts processes that outlive the worker; wait for their end:\n  sleep 61",
    ),
    "cannot-be-cancelled": (
        reward(
            "for _ in range(2):",
            "    try:",
            "        await asyncio.sleep(0.01)",
            "    except BaseException:",
            "        pass",
            "return value",
            head="async def score(self, completion):",
        ),
        "test_scoring_gives_a_number_and_changes_nothing",
        "`score` goes on after it is cancelled",
    ),
    "bool": (
        reward("return bool(value)"),
        "test_scoring_gives_a_number_and_changes_nothing",
        "scored False, a bool; return a finite float or a Score",
    ),
    "odd-details": (
        reward("return Score(value=value, details={'parts': (1, {2})})"),
        "test_scoring_gives_a_number_and_changes_nothing",
        "details['parts'] is (1, {2}), which JSON cannot hold: Object of type set is not JSON serializable",
    ),
    "changes-the-prompt": (
        reward("(completion.prompt.metadata.get('tags') or []).append('scored')", "return value"),
        "test_scoring_gives_a_number_and_changes_nothing",
        "scoring changed the prompt, payload or media of the completion '7+5=12\\n12-4=8\\n#### 8'",
    ),
    "paints": (
        reward(
            "if completion.media is None:",
            "    raise ValueError('no frames')",
            "frames = completion.media.arrays['frames'].data",
            "if not isinstance(frames, bytes):",
            "    frames[0] = 255 - frames[0]",
            "return float(len(frames))",
            capabilities=PICTURES,
            exact="\n",
        ),
        "test_scoring_gives_a_number_and_changes_nothing",
        "scoring changed the prompt, payload or media of the completion '' (reference None, frames [4, 24, 40, 3])",
    ),
    "sees-what-is-not-there": (
        reward(
            "frames = b'0' if completion.media is None else completion.media.arrays['frames'].data",
            "return float(len(frames))",
            capabilities=PICTURES,
            exact="\n",
        ),
        "test_what_cannot_be_scored_raises",
        "cannot be scored, but `score` returned 1.0; raise an error that says why",
    ),
    "sees-nothing-and-says-nothing": (
        reward("assert completion.media", "return 1.0", capabilities=PICTURES, exact="\n"),
        "test_what_cannot_be_scored_raises",
        "raised AssertionError() without a message; say why it cannot be scored",
    ),
    "random": (
        reward("return random.random()", exact="\n"),
        "test_another_process_gives_the_same_answers",
        "compute it from the completion alone",
    ),
    "remembers": (
        reward("self.seen += 1", "return float(self.seen)", exact="\n"),
        "test_another_process_gives_the_same_answers",
        "in another order; compute it from the completion alone",
    ),
    "hash": (
        reward("return float(hash(completion.text) % 1000)", exact="\n"),
        "test_another_process_gives_the_same_answers",
        "in one process, and in another with another hash seed",
    ),
    "wrong-example": (
        reward("return 1.0 - value"),
        "test_the_examples_get_their_scores",
        "the completion '8' (reference '8') scored 0.0, and `examples` says 1.0",
    ),
    "makes-numbers-up": (
        reward("return float(completion.text == completion.prompt.reference)", exact="\n"),
        "test_what_cannot_be_scored_raises",
        "the completion '8' (reference None) cannot be scored, but `score` returned",
    ),
    "swallows-every-error": (
        reward(
            "try:",
            "    return float(int(completion.text) == int(completion.prompt.reference))",
            "except Exception:",
            "    return 0.0",
            exact="\n",
        ),
        "test_the_examples_get_their_scores",
        "the completion '8' (reference '8') scores 1.0, and 0.0 when its prompt has no reference: a number that is ",
        "made up; raise an error that says why and list such a completion in `unscorable`",
    ),
    "fails-in-silence": (
        reward("if completion.prompt.reference is None:", "    raise ValueError", "return 1.0", exact="\n"),
        "test_what_cannot_be_scored_raises",
        "the completion '8' (reference None) raised ValueError() without a message",
    ),
    "fails-for-good": (
        reward(
            "if completion.prompt.reference is None:",
            "    self.seen = 1",
            "if self.seen:",
            "    raise ValueError('no reference')",
            "return 1.0",
            exact="\n",
        ),
        "test_what_cannot_be_scored_raises",
        "keep no state of them",
    ),
    "vets-too-much": (
        reward("return value") + VETS.format(condition="True", error="DataError"),
        "test_its_vetting_says_what_its_scores_say",
        "`vet` refuses the prompt of the completion '7+5=12\\n12-4=8\\n#### 8' (reference '8'), which gets a score: no",
    ),
    "vets-with-another-error": (
        reward("return value") + VETS.format(condition="prompt.reference is None", error="KeyError"),
        "test_its_vetting_says_what_its_scores_say",
        "`vet` raised KeyError ('no reference') for the prompt of the completion '8' (reference None); raise a Data",
    ),
    "scores-what-it-refused": (
        reward("return float(completion.text == '8')", exact="\n")
        + VETS.format(condition="prompt.reference is None", error="DataError"),
        "test_its_vetting_says_what_its_scores_say",
        "`vet` refuses the prompt of the completion '8' (reference None), but `score` returned; let both say the same",
    ),
    "lacks-what-is-there": (
        reward("return value") + REQUIRES.format(absent="'REWARD_KEY is not set'", without=REFUSES),
        "test_it_says_what_is_absent",
        "`absent` says 'REWARD_KEY is not set', where a worker has scored",
    ),
    "tells-no-text": (
        reward("return value") + REQUIRES.format(absent="None", without=REFUSES),
        "test_it_says_what_is_absent",
        "`absent` says None, where a worker has scored; return '' where nothing is absent",
    ),
    "lacks-nothing": (
        reward("return value") + REQUIRES.format(absent="''", without="raise ConfigError('no key')"),
        "test_it_says_what_is_absent",
        "`absent` says '' without REWARD_KEY in the environment; name what to set",
    ),
    "needs-nothing": (
        reward("return value")
        + REQUIRES.format(absent=KEYLESS, without=REFUSES)
        + "Reward.unset_variables = lambda self, given: ()\n",
        "test_it_names_the_variables_that_are_not_given",
        "`unset_variables` of () says (); it should be ['REWARD_KEY']",
    ),
    "loads-without": (
        reward("return value") + REQUIRES.format(absent=KEYLESS, without="pass"),
        "test_it_says_what_is_absent",
        "`absent` says 'REWARD_KEY is not set', but `load` returned; let it raise a ConfigError",
    ),
    "stumbles-without": (
        reward("return value") + REQUIRES.format(absent=KEYLESS, without="os.environ['REWARD_KEY']"),
        "test_it_says_what_is_absent",
        "but `load` raised KeyError ('REWARD_KEY'); let it raise a ConfigError",
    ),
    "cannot-load": (
        reward("return value") + LOADS.replace("self.unit = 1.0", "raise OSError('no such weights')"),
        "test_every_ordinary_input_is_answered_in_time",
        "could not load: OSError: no such weights",
    ),
    "latents-only": (
        reward("return value", capabilities="payload_kinds=frozenset({'latents'})"),
        "test_every_ordinary_input_is_answered_in_time",
        "override the fixture `completions` with some that have payloads",
    ),
    "scores-nothing": (
        reward("return value", capabilities="payload_kinds=frozenset()"),
        "test_what_it_scores_is_declared",
        "payload_kinds is frozenset(); declare what it scores, such as frozenset({'tokens'})",
    ),
}
EXAMPLES = TABLES.partition("unscorable")[0]
BODIES = {
    **dict.fromkeys(("random", "remembers", "hash", "tossed"), ""),
    **dict.fromkeys(("pictures", "paints", "sees-what-is-not-there", "sees-nothing-and-says-nothing"), ""),
    **dict.fromkeys(
        (
            *("requires", "lacks-what-is-there", "tells-no-text", "lacks-nothing", "needs-nothing"),
            *("loads-without", "stumbles-without"),
        ),
        f"{TABLES}{KEY}",
    ),
    "latents": LATENTS,
    "tossed-beside-examples": "examples = [(Completion(prompt=EIGHT, text='8'), 1.0)]",
    "judges-without-a-reference": f"{EXAMPLES}\nreference_is_optional = True\n",
    "needs-no-reference": EXAMPLES,
    "swallows-every-error": EXAMPLES,
    "hangs": f"timeout_s = 2.0\n{TABLES}",
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = GOOD | {name: source for name, (source, *_) in PLANTED.items()}
    return run_kit("reward", modules, header=HEADER, bodies=dict.fromkeys(modules, TABLES) | BODIES)


def test_good_rewards_pass(outcomes):
    assert wrong(outcomes, GOOD) == {}


def test_each_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}
