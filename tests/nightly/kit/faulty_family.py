"""Language models with a planted fault: the family that works, and ways to spoil each of its methods."""

import textwrap

from cosmos_core.testing import ModelConformance

FAMILY = """
import attrs, torch
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, tokens_payload, values
from cosmos_core.protocols import ModelCapabilities, Provider, hookimpl

CAPABILITIES = ModelCapabilities()

class Family(HuggingFaceModel):
{methods}

{after}

@hookimpl
def cosmos_model():
    return Provider(create=Family, options=HuggingFaceOptions, capabilities=CAPABILITIES)
"""


def family(methods="pass", after=""):
    return FAMILY.format(methods=textwrap.indent(textwrap.dedent(methods), "    "), after=after)


def decide(line, after=""):
    """A `decide` that spoils what the family's own says."""
    return family(
        f"""
        def decide(self, module, batch, *, temperature, with_entropy=False):
            {line}
            return decided
        """,
        after,
    )


def build(*lines, after=""):
    """A `build` that spoils the module that the family makes."""
    body = "\n".join(f"    {line}" for line in lines)
    return family(f"def build(self, *, seed, dtype, device, layout=None):\n{body}\n    return module", after)


OWN_DECIDE = "decided = super().decide(module, batch, temperature=temperature, with_entropy=with_entropy)"
OWN_BUILD = "module = super().build(seed=seed, dtype=dtype, device=device, layout=layout)"


def logprobs(expression, after=""):
    """A `decide` whose log-probs `own` become something else."""
    return decide(
        f"{OWN_DECIDE}; own = decided.logprobs_N; decided = attrs.evolve(decided, logprobs_N={expression})", after
    )


def pack(expression, after=""):
    """A `pack` that gives something else than the family's own `batches`."""
    return family(
        f"""
        def pack(self, payloads, *, budget, multiple=1, is_uniform=False):
            batches = super().pack(payloads, budget=budget, multiple=multiple, is_uniform=is_uniform)
            return {expression}
        """,
        after,
    )


def axes(*names):
    """What a family declares."""
    return f"CAPABILITIES = ModelCapabilities(mesh_axes=frozenset({set(names)}))"


def facts(expression):
    """`facts` that are changed."""
    return family(
        f"""
        # Of a family that it names no small model is tried.
        model_types = frozenset({{"llama"}})

        def facts(self):
            facts = super().facts()
            return attrs.evolve(facts, {expression})
        """
    )


def demonstration(expression):
    """An `encode_demonstration` that gives something else than the family's own `payload`."""
    return family(
        f"""
        def encode_demonstration(self, prompt):
            payload = super().encode_demonstration(prompt)
            prompt, completion = (values(payload, name) for name in ("prompt", "completion"))
            return {expression}
        """
    )


TINY = """
TINY = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3,
}
"""
TESTS = [name for name in dir(ModelConformance) if name.startswith("test_")]
LAYOUT_TESTS = {
    "test_only_forwards_of_a_step_are_counted",
    "test_declared_mesh_axes_equal_one_process",
}
"""Those of many processes, whose faults have a module of their own."""
FORWARD_TESTS = {
    "test_each_image_or_video_is_shown_where_it_stands",
    "test_each_unit_of_a_prompt_enters_by_the_weights",
    "test_training_on_its_own_records_changes_nothing",
    "test_what_a_turn_shows_enters_where_it_stands_and_what_the_model_wrote_shows_nothing",
}
"""Those of what engines run themselves; likewise."""
COMPARING_TESTS = {
    "test_divergences_are_distances_that_their_gradient_shortens",
    "test_what_is_asked_for_is_given_and_nothing_else",
}
"""Those of what is asked besides log-probs; likewise."""
_NOT_DENOISING = "not declared: the model does not denoise (`WorldModel`)"
WORLD_TESTS = {
    "test_a_latent_spec_says_what_is_denoised": _NOT_DENOISING,
    "test_velocities_depend_on_the_row_alone": _NOT_DENOISING,
    "test_guidance_begins_at_the_neutral_one": _NOT_DENOISING,
    "test_transitions_are_normal_round_what_the_velocity_says": _NOT_DENOISING,
    "test_points_are_drawn_by_the_seed_alone": _NOT_DENOISING,
    "test_regressions_are_errors_of_the_velocity": _NOT_DENOISING,
    "test_blends_lie_between_both_models": "it declares no blends",
}
"""Those of world models, likewise, and why others skip them."""


def unnamed(outcomes, planted):
    """The planted faults that the kit does not name, each with what it says instead."""
    said = {name: {each.test: each.message for each in outcomes[name] if each.result == "failed"} for name in planted}
    return {
        name: said[name] for name, (*_, test, message) in planted.items() if message not in said[name].get(test, "")
    }


def only(*tests):
    """A class body that leaves some tests of the kit: so many plugins would take minutes with all of it."""
    return "".join(f"{name} = None\n" for name in TESTS if name not in tests)
