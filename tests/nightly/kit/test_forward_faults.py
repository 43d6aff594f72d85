"""Faults of what engines run of a model themselves: how prompts enter a forward, and what forwards record."""

import textwrap

import pytest

from tests.nightly.kit.faulty_family import FORWARD_TESTS, TINY, family, only, unnamed

pytestmark = pytest.mark.slow

RECORDS = """
def records(self):
    return (Record(name="state", dtype="float32", shape=(2,), option="model.options.any"),)

def record(self, module):
    newest = {}

    def note(layer, inputs, output):
        hidden_UD = (output[0] if isinstance(output, tuple) else output)[0]
        newest["state"] = hidden_UD[:, :2].float()

    module.model.layers[-1].register_forward_hook(note)
    return lambda: newest

def counters(self, module):
    return []

def after_step(self, module):
    return {}

def pack(self, payloads, *, budget, **padding):
    self.replays = any("state" in payload.arrays for payload in payloads)
    return super().pack(payloads, budget=budget, **padding)
"""

ENTERS = """
def encode(self, prompt):
    payload = super().encode(prompt)
    if not prompt.media:
        return payload
    units = payload.arrays["prompt"].shape[0]
    shades = Array(dtype="float32", shape=(units,), data=np.linspace(0, 1, units, dtype=np.float32).tobytes())
    sizes = Array(dtype="int32", shape=(1,), data=np.int32(units).tobytes())
    return attrs.evolve(payload, arrays={**payload.arrays, "shades": shades, "sizes": sizes})

def condition(self, prompt):
    shown = prompt.arrays.keys() - {"prompt"}
    if not shown:
        return None
    if shown != {"shades", "sizes"}:
        raise DataError(f"a prompt that shows something has shades and sizes, not {sorted(shown)}")
    tokens = torch.from_numpy(values(prompt, "prompt").astype(np.int64))
    units = len(tokens)
    inputs = {"tokens": tokens, "shades": torch.from_numpy(values(prompt, "shades").copy())}
    batch = MicroBatch(sequences=(0,), num_decisions=(0,), num_units=units, inputs=inputs)
    return Conditioning(positions=torch.arange(units), next_position=units, batch=batch)

def enter(self, module, conditioning):
    inputs = conditioning.batch.inputs
    return {"embeddings": module.get_input_embeddings()(inputs["tokens"]) * (1 + inputs["shades"][:, None])}

def evaluate(self, module, inputs):
    raise NotImplementedError("engines are tested by their own kit")

shown = None
"""
SHOWS = (
    ENTERS
    + """
def shown(self, prompt):
    if prompt.arrays.keys() == {"prompt"}:
        return []
    if prompt.arrays.keys() != {"prompt", "shades", "sizes"}:
        raise DataError("it has shades and sizes")
    units = prompt.arrays["prompt"].shape[0]
    shades = torch.from_numpy(values(prompt, "shades").copy())
    seen = torch.ones(units - 1, dtype=torch.bool)
    return [Shown(modality="image", start=1, is_seen_U=seen, inputs={"pixel_values": shades[None]})]
"""
)
TURNS = """
def encode_seen_turns(self, prompt, written, turns):
    said = [attrs.evolve(turn, media=()) for turn in turns]
    encoded = tokens_payload(list(self.encode_turns(prompt, written, said)))
    units = encoded.arrays["prompt"].shape[0]
    return self.with_shades(encoded, np.ones(units)) if any(turn.media for turn in turns) else encoded

def with_shades(self, payload, shades):
    given = np.asarray(shades, np.float32)
    arrays = {
        "shades": Array(dtype="float32", shape=given.shape, data=given.tobytes()),
        "sizes": Array(dtype="int32", shape=(1,), data=np.int32(len(given)).tobytes()),
    }
    return attrs.evolve(payload, arrays={**payload.arrays, **arrays})

def shades(self, part):
    return values(part, "shades") if "shades" in part.arrays else np.zeros(part.arrays["prompt"].shape[0])

def join(self, parts):
    ids = np.concatenate([values(part, "prompt") for part in parts])
    return self.with_shades(tokens_payload(ids.tolist()), np.concatenate([self.shades(part) for part in parts]))
"""
OWN_ENTER = "super().enter(module, conditioning)"


def spoiled(base, method):
    """A model whose methods work, and one of them once more, spoiled."""
    source = family(base).replace("class Family(", "class Working(")
    imports = """
import numpy as np
from cosmos_core.errors import DataError
from cosmos_core.protocols import MicroBatch
from cosmos_core.protocols.model import Record
from cosmos_core.protocols.vision import Conditioning, Shown
from cosmos_core.types import Array
"""
    wrong = f"class Family(Working):\n{textwrap.indent(textwrap.dedent(method), '    ')}\n\n@hookimpl"
    return imports + source.replace("@hookimpl", wrong)


def shows(expression):
    """A `shown` that gives something else; `own` is what it should give."""
    method = f"def shown(self, prompt):\n    own = super().shown(prompt)\n    return {expression} if own else own"
    return spoiled(SHOWS, method)


def enters(expression):
    """An `enter` that gives something else."""
    return spoiled(ENTERS, f"def enter(self, module, conditioning): return {expression}")


PLANTED = {
    "record-of-the-last-unit": (
        spoiled(
            RECORDS,
            """
            def record(self, module):
                newest = super().record(module)
                return lambda: {"state": newest()["state"][-1:]}
            """,
        ),
        "test_training_on_its_own_records_changes_nothing",
        "recorded {'state': ('float32', (1, 2))}; records() declares",
    ),
    "replay-shifts": (
        spoiled(
            RECORDS,
            """
            def decide(self, module, batch, *, temperature, with_entropy=False):
                decided = super().decide(module, batch, temperature=temperature, with_entropy=with_entropy)
                return attrs.evolve(decided, logprobs_N=decided.logprobs_N - 0.01 * self.replays)
            """,
        ),
        "test_training_on_its_own_records_changes_nothing",
        "with its own records, under the same weights, log-probs differ, number 0",
    ),
    "text-conditioned": (
        spoiled(
            ENTERS,
            """
            def condition(self, prompt):
                given = {"shades": Array(dtype="float32", shape=(0,), data=b""), "sizes": prompt.arrays["prompt"]}
                return super().condition(attrs.evolve(prompt, arrays={**given, **prompt.arrays}))
            """,
        ),
        "test_each_unit_of_a_prompt_enters_by_the_weights",
        "condition() of a prompt without media gave something",
    ),
    "no-row-for-the-last-unit": (
        enters("{'embeddings': " + OWN_ENTER + "['embeddings'][:-1]}"),
        "test_each_unit_of_a_prompt_enters_by_the_weights",
        "give a row for each unit",
    ),
    "position-lost": (
        spoiled(
            ENTERS,
            """
            def condition(self, prompt):
                own = super().condition(prompt)
                return own and attrs.evolve(own, positions=own.positions[1:])
            """,
        ),
        "test_each_unit_of_a_prompt_enters_by_the_weights",
        "positions of ",
    ),
    "never-enters": (
        spoiled(ENTERS, "def condition(self, prompt): return None"),
        "test_each_unit_of_a_prompt_enters_by_the_weights",
        "it would be computed as text",
    ),
    "remembers-what-entered": (
        spoiled(
            ENTERS,
            """
            def enter(self, module, conditioning):
                self.kept = getattr(self, "kept", None) or super().enter(module, conditioning)
                return self.kept
            """,
        ),
        "test_each_unit_of_a_prompt_enters_by_the_weights",
        "enter() gave the same for other weights",
    ),
    "noise-enters": (
        enters("{name: rows + torch.rand_like(rows) for name, rows in " + OWN_ENTER + ".items()}"),
        "test_each_unit_of_a_prompt_enters_by_the_weights",
        "enter() gave something else for the same weights and prompt",
    ),
    "array-not-missed": (
        spoiled(
            ENTERS,
            """
            def condition(self, prompt):
                own = {"sizes": prompt.arrays["prompt"], **prompt.arrays}
                return super().condition(attrs.evolve(prompt, arrays=own) if "shades" in prompt.arrays else prompt)
            """,
        ),
        "test_each_unit_of_a_prompt_enters_by_the_weights",
        "without its array 'sizes'",
    ),
    "array-passed-over": (
        spoiled(
            ENTERS,
            """
            def condition(self, prompt):
                own = {name: prompt.arrays[name] for name in ("prompt", "shades", "sizes") if name in prompt.arrays}
                return super().condition(attrs.evolve(prompt, arrays=own))
            """,
        ),
        "test_each_unit_of_a_prompt_enters_by_the_weights",
        "condition() took a prompt with an array that no model knows",
    ),
    "shown-twice": (
        shows("own * 2"),
        "test_each_image_or_video_is_shown_where_it_stands",
        "shown() of a prompt with 1 media gave 2; give one for each",
    ),
    "shown-behind-the-prompt": (
        shows("[attrs.evolve(own[0], start=2)]"),
        "test_each_image_or_video_is_shown_where_it_stands",
        "they lie in the prompt, share no unit",
    ),
    "shown-words": (
        shows("[attrs.evolve(own[0], is_seen_U=~own[0].is_seen_U)]"),
        "test_each_image_or_video_is_shown_where_it_stands",
        "the last unit of each is seen",
    ),
    "shown-without-an-array": (
        spoiled(
            SHOWS,
            """
            def shown(self, prompt):
                own = {"sizes": prompt.arrays["prompt"], **prompt.arrays}
                return super().shown(attrs.evolve(prompt, arrays=own) if "shades" in prompt.arrays else prompt)
            """,
        ),
        "test_each_image_or_video_is_shown_where_it_stands",
        "without its array 'sizes'",
    ),
}
SEEING = spoiled(ENTERS + TURNS, "pass")
IN_TURNS = "test_what_a_turn_shows_enters_where_it_stands_and_what_the_model_wrote_shows_nothing"
PLANTED |= {
    name: (spoiled(ENTERS + TURNS, method), IN_TURNS, message)
    for name, method, message in [
        (
            "turns-without-words",
            "def encode_seen_turns(self, *a): return super().encode_seen_turns(*a[:2], a[2] * 2)",
            "encode_seen_turns() of a turn without images has other ids than encode_turns()",
        ),
        (
            "turns-unseen",
            """
            def with_shades(self, payload, shades):
                return payload
            """,
            "a turn with an image has no arrays of what it shows",
        ),
        ("joined-backwards", "def join(self, parts): return super().join(parts[::-1])", "join() gave other ids"),
        (
            "joined-by-number",
            """
            def join(self, parts):
                whole = super().join(parts)
                return self.with_shades(whole, self.shades(whole) / (1 + len(parts)))
            """,
            "join() of joined parts is not what it is of the parts",
        ),
        (
            "dimmer-beside-others",
            """
            def enter(self, module, conditioning):
                return {name: rows / len(rows) for name, rows in super().enter(module, conditioning).items()}
            """,
            "off in a dialogue; each enters as it does alone",
        ),
        (
            "written-seen",
            "def shades(self, part): return np.ones(part.arrays['prompt'].shape[0])",
            "what the model wrote enters",
        ),
    ]
}
PLANTED["shown-once"] = (spoiled(SHOWS + TURNS, "pass"), IN_TURNS, "shown() of a dialogue of 2 images gave 1")
BODY = """
config = TINY

@pytest.fixture
def prompts(self):
    rows = [("2+2=", "4"), ("How many?", "Twenty-one")]
    return [*(Prompt(text=text, demonstration=answer) for text, answer in rows), *SHOWN]
"""
HEADER = f"""
{TINY}
from cosmos_core.types import Prompt
"""
SHOWN = "SHOWN = [Prompt(text='Which shade is it?', media=('shade.png',))]"
GOOD = {
    "recording": spoiled(RECORDS, "pass"),
    "conditioned": spoiled(ENTERS, "pass"),
    "showing": spoiled(SHOWS, "pass"),
    "seeing": SEEING,
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = {**GOOD, **{name: source for name, (source, *_) in PLANTED.items()}}
    bodies = {name: only(test) for name, (_, test, _) in PLANTED.items()}
    bodies |= dict.fromkeys(GOOD, only(*FORWARD_TESTS))
    return run_kit("model", modules, header=f"{HEADER}\n{SHOWN}\n", body=BODY, bodies=bodies)


def test_good_models_pass(outcomes):
    passed = {each.test for name in GOOD for each in outcomes[name] if each.result == "passed"}
    assert passed >= FORWARD_TESTS
    assert {each.message for name in GOOD for each in outcomes[name] if each.result == "failed"} == set()


def test_every_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}


def test_every_test_of_forwards_can_fail():
    assert {test for _, test, _ in PLANTED.values()} == FORWARD_TESTS
