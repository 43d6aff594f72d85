"""Language models with a planted fault: the family that works, and ways to spoil each of its methods."""

import textwrap

from cosmos_core.testing import ModelConformance
from cosmos_core.testing.conformance.model.latents import ModelBlending
from cosmos_core.testing.conformance.model.noise import ModelDenoising, ModelNoising

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
    "test_padded_micro_batches_have_the_sizes_asked_for",
    "test_padding_decides_nothing",
    "test_only_forwards_of_a_step_are_counted_from_zero",
    "test_acting_on_counts_leaves_trained_parameters_alone",
    "test_declared_mesh_axes_equal_one_process",
    "test_undeclared_mesh_axes_are_refused",
}
"""Those of many processes, whose faults have a module of their own."""
FORWARD_TESTS = {
    "test_a_prompt_that_lacks_an_array_is_refused",
    "test_an_array_that_it_does_not_know_is_refused",
    "test_each_image_or_video_is_shown_once_and_where_it_stands",
    "test_each_unit_has_a_record_of_what_is_declared",
    "test_every_unit_of_a_prompt_has_a_position_and_features",
    "test_text_needs_no_conditioning",
    "test_training_on_its_own_records_changes_nothing",
    "test_what_enters_follows_the_weights",
    "test_what_is_shown_lacks_no_array",
}
"""Those of what engines run themselves; likewise."""
COMPARING_TESTS = {
    "test_divergences_are_distances",
    "test_divergences_do_not_depend_on_what_else_is_packed",
    "test_features_are_there_where_declared",
    "test_fewer_outcomes_told_apart_are_not_further_apart",
    "test_the_gradient_of_a_divergence_brings_distributions_together",
    "test_what_is_asked_besides_changes_no_log_prob",
}
"""Those of what is asked besides log-probs; likewise."""

WORLD_TESTS = {
    name: why
    for kind, why in (
        (ModelDenoising, "not declared: the model does not denoise (`Denoising`)"),
        (ModelNoising, "not declared: the model learns no regressions (`Noising`)"),
        (ModelBlending, "it declares no blends"),
    )
    for name in vars(kind)
    if name.startswith("test_")
}
"""Those of world models, likewise, and why others skip them."""


def only(*tests):
    """A class body that leaves some tests of the kit: so many plugins would take minutes with all of it."""
    kept = {test.partition("[")[0] for test in tests}
    return "".join(f"{name} = None\n" for name in TESTS if name not in kept)
