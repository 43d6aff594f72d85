"""Faults of world models: what denoises, draws points, blends predictions, and splits sequences."""

from pathlib import Path

import pytest

from tests.nightly.kit.faulty_family import WORLD_TESTS, only, unnamed

pytestmark = pytest.mark.slow

WORLD = (Path(__file__).parents[2] / "world_model.py").read_text()
HEADER = """
import torch
from faulty_model_world import World, array, drawn, load_file, math, view, walked
from cosmos_core.protocols import Decided
from cosmos_core.types import Prompt

"""
# What the author of a world model adds: rows, some that give a frame, and what decisions should be.
BODY = """
config = {}
tokenizer = None
temperatures = (1.0,)

@pytest.fixture
def prompts(self):
    return [
        Prompt(text="a red ball", demonstration="red.mp4"),
        Prompt(text="rain", demonstration="rain.mp4", media=("0.5",)),
    ]

@pytest.fixture
def payloads(self, model, prompts):
    shown = [model.encode_demonstration(prompt) for prompt in prompts]
    learned = [model.noised(payload, 3 + number, num_decisions=number) for number, payload in enumerate(shown, 2)]
    return [*learned, walked(model.encode(prompts[0]), 4, 0), walked(model.encode(prompts[1]), 1, 5)]

def reference(self, model, module, payloads, *, temperature):
    return [self.one(model, module, payload) for payload in payloads]

def one(self, model, module, payload):
    seen = view(payload, "is_given") if "is_given" in payload.arrays else torch.zeros(3, dtype=torch.bool)
    times = view(payload, "times")

    def mean(values):
        return values[:, :, ~seen].flatten(1).mean(1)

    def velocity(states):
        return model.velocity(module, states, times, [payload] * len(times), guidance=1.0)

    with torch.no_grad():
        if "noise_seed" in payload.arrays:
            sample, t = view(payload, "sample"), times[:, None, None, None, None]
            noise = torch.stack([drawn(int(view(payload, "noise_seed")) + n, 2, 3, 2, 2) for n in range(len(times))])
            states = (1 - t) * sample + t * noise
            states[:, :, seen] = sample[:, seen]
            return Decided(logprobs_N=-mean((velocity(states) - (noise - sample)).square()), entropy_N=None)
        states = view(payload, "states")
        a, b, std = (each[:, None, None, None, None] for each in view(payload, "steps").unbind(1))
        steps = torch.distributions.Normal(a * states[:-1] + b * velocity(states[:-1]), std)
        return Decided(logprobs_N=mean(steps.log_prob(states[1:])), entropy_N=None)

def load_exported(self, directory):
    return load_file(directory / "model.safetensors")
"""


def changed(old, new):
    assert WORLD.count(old) == 1, old
    return WORLD.replace(old, new)


VELOCITY = "        return found.masked_fill(given[:, None, :, None, None], 0.0)"
NOISE = "        noise_seed = torch.randint(1 << 40, (), generator=generator)"
SQUARED = "            squared_NK=torch.stack([mean(error.square()) for error in errors], 1),"
ABSOLUTE = "            absolute_NK=torch.stack([mean(error.detach().abs()) for error in errors], 1),"
PLACED = (
    "        return [self._lay_out(payloads, rows[start : start + budget]) for start in range(0, len(rows), budget)]"
)

DENOISING = {
    "latent-spec-drawn": (
        changed(
            "            return LatentSpec(shape=SHAPE)",
            "            return LatentSpec(shape=(*SHAPE[:3], 1 + int(torch.randint(99, ()))))",
        ),
        "test_a_latent_spec_says_what_is_denoised",
        "says something else a second time",
    ),
    "latent-spec-half": (
        changed(', is_given_T=view(prompt, "is_given"))', ")"),
        "test_a_latent_spec_says_what_is_denoised",
        "has only one of given and is_given_T",
    ),
    "flat": (
        changed(VELOCITY, VELOCITY + ".flatten(1)"),
        "test_velocities_depend_on_the_row_alone",
        "velocity() at time 0 (of 0 to 1) is torch.float32 [1, ",
    ),
    "ends": (
        changed(VELOCITY, VELOCITY + " / times_B[:, None, None, None, None]"),
        "test_velocities_depend_on_the_row_alone",
        "velocity() at time 0 (of 0 to 1) is torch.float32 [1, ",
    ),
    "restless": (
        changed(VELOCITY, VELOCITY + " + torch.rand(())"),
        "test_velocities_depend_on_the_row_alone",
        "gives other numbers the second time",
    ),
    "deaf": (
        changed("np.frombuffer(prompt.text.encode().ljust(WIDTH)[:WIDTH], np.uint8)", "np.zeros(WIDTH, np.uint8)"),
        "test_velocities_depend_on_the_row_alone",
        "is the same for a row whatever its text says",
    ),
    "moves-given": (
        changed(VELOCITY, "        return found"),
        "test_velocities_depend_on_the_row_alone",
        "moves frames that are given",
    ),
    "all-stand": (
        changed(VELOCITY, "        return found * (not given.any())"),
        "test_velocities_depend_on_the_row_alone",
        "or none of the others",
    ),
    "crowded": (
        changed(VELOCITY, VELOCITY.replace("found.", "(found + found.mean()).", 1)),
        "test_velocities_depend_on_the_row_alone",
        "with what else is in the batch",
    ),
    "curved": (
        changed("plain + guidance_N[:", "plain + guidance_N.square()[:"),
        "test_guidance_begins_at_the_neutral_one",
        "do not lie on a line",
    ),
    "unguided": (
        changed("return plain + guidance_N[:, None, None, None, None] * (found - plain)", "return found"),
        "test_guidance_begins_at_the_neutral_one",
        "does not change with the guidance",
    ),
    "always-two": (
        changed("        if (guidance_N == self.neutral_guidance).all():", "        if False:"),
        "test_guidance_begins_at_the_neutral_one",
        "one forward is enough there",
    ),
    "sum": (
        changed("/ decided.flatten(1).sum(1)", "/ 3.0"),
        "test_transitions_are_normal_round_what_the_velocity_says",
        "by velocity() they are",
    ),
    "given-decided": (
        changed("1.0 - torch.tensor([*bytes(each.data)]).float()", "torch.ones(SHAPE[1])"),
        "test_transitions_are_normal_round_what_the_velocity_says",
        "offset; payload 1, number",
    ),
    "no-offsets": (
        changed(" - offset(payload, number)", ""),
        "test_transitions_are_normal_round_what_the_velocity_says",
        "by velocity() they are",
    ),
    "guidance-lost": (
        changed('held["texts"], held["guidance"])', 'held["texts"], torch.ones(len(held["times"])))'),
        "test_transitions_are_normal_round_what_the_velocity_says",
        "at guidance 3",
    ),
    "no-frames": (
        changed('"fps": array(8.0)', '"rate": array(8.0)'),
        "test_a_latent_spec_says_what_is_denoised",
        "with frames uint8",
    ),
    "float-frames": (
        changed('array(frames, "uint8")', "array(frames)"),
        "test_a_latent_spec_says_what_is_denoised",
        "uint8 [frames, height, width, 3]",
    ),
    "black": (
        changed("* 127.5).clamp(0, 255)", "* 0.0).clamp(0, 255)"),
        "test_a_latent_spec_says_what_is_denoised",
        "the same frames of other latents",
    ),
}
NOISING = {
    "unseeded": (
        changed("generator = torch.Generator().manual_seed(seed)\n        times", "generator = None\n        times"),
        "test_points_are_drawn_by_the_seed_alone",
        "draws other points a second time",
    ),
    "one-seed": (
        changed("manual_seed(seed)\n        times", "manual_seed(0)\n        times"),
        "test_points_are_drawn_by_the_seed_alone",
        "draws the same points from another seed",
    ),
    "too-many": (
        changed("times = torch.rand(num_decisions or REGRESSIONS", "times = torch.rand(REGRESSIONS"),
        "test_points_are_drawn_by_the_seed_alone",
        "noised(num_decisions=6) drew 3 times",
    ),
    "thousand": (
        changed('"times": array(times), "noise', '"times": array(1000 * times), "noise'),
        "test_points_are_drawn_by_the_seed_alone",
        "they lie in [0, 1]",
    ),
    "loses": (
        changed('arrays={**payload.arrays, "times"', 'arrays={"sample": payload.arrays["sample"], "times"'),
        "test_points_are_drawn_by_the_seed_alone",
        "noised() changed",
    ),
    "backwards": (
        changed("yield number, noised, time, noise - sample,", "yield number, noised, time, noise + sample / 2,"),
        "test_regressions_are_errors_of_the_velocity",
        "minus the mean squared distance",
    ),
    "one-noise": (
        changed("(seed + number) % (1 << 62)", "seed"),
        "test_regressions_are_errors_of_the_velocity",
        "another for each",
    ),
}
BLENDING = {
    "swapped": (
        changed("share * velocity + (1 - share) * theirs", "(1 - share) * velocity + share * theirs"),
        "test_blends_lie_between_both_models",
        "a blend with a share of 1 is off by",
    ),
    "of-velocity": (
        changed("errors = [times * (", "errors = [1.0 * ("),
        "test_blends_lie_between_both_models",
        "t² times the regression's",
    ),
    "errors-blended": (
        changed(
            'times * (share * velocity + (1 - share) * theirs - held["aims"])',
            'times * (share * (velocity - held["aims"]).square() + (1 - share) * (theirs - '
            'held["aims"]).square() + 1e-9).clamp_min(1e-9).sqrt()',
        ),
        "test_blends_lie_between_both_models",
        "blend predictions, not errors",
    ),
    "blend-detached": (
        changed(SQUARED, SQUARED.replace("for error in errors], 1)", "for error in errors], 1).detach()")),
        "test_blends_lie_between_both_models",
        "squared_NK of blends carries no gradient",
    ),
    "absolute-learnt": (
        changed(ABSOLUTE, ABSOLUTE.replace(".detach()", "")),
        "test_blends_lie_between_both_models",
        "absolute_NK of blends carries a gradient; detach it",
    ),
    "absolute-summed": (
        changed(ABSOLUTE, ABSOLUTE.replace("mean(error.detach().abs())", "9 * mean(error.detach().abs())")),
        "test_blends_lie_between_both_models",
        "is larger than the root of the mean squared one",
    ),
    "blend-crowded": (
        changed(SQUARED, SQUARED.replace("for error in errors], 1)", "for error in errors], 1).flip(0)")),
        "test_blends_lie_between_both_models",
        "or changes with what else is packed",
    ),
    "blend-unasked": (
        changed(
            "        if kl_target is not None:\n",
            "        if kl_target is None and prediction_for is None:\n"
            '            found["blended"] = Blended(squared_NK=logprobs_N[:, None], absolute_NK=logprobs_N[:, None])\n'
            "        if kl_target is not None:\n",
        ),
        "test_what_is_asked_for_is_given_and_nothing_else",
        "decide({}) gave blended, logprobs_N; give",
    ),
}
SPLITTING = {
    "span-lost": (
        changed(PLACED, PLACED + "[: max(1, -(-len(rows) // budget) - 1)]"),
        "test_each_payload_is_packed_once_within_the_budget",
        "give every decision once",
    ),
    "shuffled": (
        changed(PLACED, PLACED + "[::-1]"),
        "test_each_payload_is_packed_once_within_the_budget",
        "give every decision once, in order",
    ),
    "short-total": (
        changed("total=totals[index]) for", "total=len(each)) for"),
        "test_each_payload_is_packed_once_within_the_budget",
        "is packed as",
    ),
    "cut": (
        changed(PLACED, PLACED.replace("for start in range(0, len(rows), budget)", "for start in (0,)")),
        "test_each_payload_is_packed_once_within_the_budget",
        "give every decision once",
    ),
    "flipped": (
        changed("torch.stack([time for _, _, _, time, *_ in rows])", "torch.stack([row[3] for row in rows]).flip(0)"),
        "test_log_probs_do_not_depend_on_how_payloads_are_packed",
        "log-probs change",
    ),
}
TEXTS = "test_velocities_depend_on_the_row_alone"
# A right model whose rows have an embedding of their own, which comes before the text.
TOLD = changed("np.frombuffer(prompt.text.encode()", 'np.frombuffer(prompt.metadata["words"].encode()')
TOLD_BODY = """
@pytest.fixture
def prompts(self):
    return [
        Prompt(text=text, demonstration=f"{text}.mp4", metadata={"words": "ball"}) for text in ("a red ball", "rain")
    ]
"""
# A checkpoint has one set of weights, whatever the seed.
CHECKPOINT = changed("            torch.manual_seed(seed)\n", "            torch.manual_seed(7)\n")
BLENDS = ["test_blends_lie_between_both_models", "test_divergences_are_distances_that_their_gradient_shortens"]
PLANTED = {**DENOISING, **NOISING, **BLENDING, **SPLITTING}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = {"world": WORLD, "told": TOLD, **{name: source for name, (source, *_) in PLANTED.items()}}
    bodies = {name: BODY + only(test) for name, (_, test, _) in PLANTED.items()}
    modules["checkpoint"] = CHECKPOINT
    bodies |= {"world": BODY, "checkpoint": BODY + only(*BLENDS), "told": BODY + TOLD_BODY + only(TEXTS)}
    return run_kit("model", modules, header=HEADER, bodies=bodies)


def test_a_good_world_model_passes(outcomes):
    results = {each.test: each.result for each in outcomes["world"]}
    assert {name for name, result in results.items() if result == "failed"} == set()
    assert {results[name] for name in WORLD_TESTS} == {"passed"}
    assert results["test_divergences_are_distances_that_their_gradient_shortens"] == "passed"


def test_a_world_model_whose_weights_no_seed_changes_passes(outcomes):
    said = {each.test: (each.result, each.message) for each in outcomes["checkpoint"] if each.test in BLENDS}
    assert said == dict.fromkeys(BLENDS, ("passed", ""))


def test_rows_whose_metadata_may_say_more_are_not_held_to_their_texts(outcomes):
    (found,) = (each for each in outcomes["told"] if each.test == TEXTS)
    lacking = "not given: two rows of other texts, without metadata; not given: no row of `prompts` gives frames"
    assert (found.result, found.message) == ("skipped", f"{lacking}; the other checks of this test passed")


def test_every_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}


def test_every_test_of_world_models_can_fail():
    assert {test for _, test, _ in PLANTED.values()} >= WORLD_TESTS.keys()
