"""Faults of models that the kit must name: one good language model, one good latent model, and many wrong ones."""

import textwrap
from pathlib import Path

import pytest

from cosmos_core.protocols import ModelCapabilities
from cosmos_core.testing import ModelConformance
from cosmos_core.testing.conformance.model import declarations
from cosmos_core.testing.conformance.plugin import PluginConformance

pytestmark = pytest.mark.slow

FAMILY = """
import attrs, torch
from cosmos_core.policy.modeling import HuggingFaceModel, HuggingFaceOptions, tokens_payload, values
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


DECISIONS = {
    "wrong-scale": (
        decide(OWN_DECIDE.replace("temperature=temperature", "temperature=temperature * 1.02")),
        "test_log_probs_equal_the_reference",
        "log-probs at temperature 1 are not those of the reference; payload",
    ),
    "temperature-ignored": (
        decide(OWN_DECIDE.replace("temperature=temperature", "temperature=1.0")),
        "test_log_probs_equal_the_reference",
        "log-probs at temperature 0.6 are not those of the reference",
    ),
    "tame": (
        family(),
        "test_a_mistake_would_show_in_this_model",
        "such as initializer_range = 0.2 in its config",
    ),
    "packing-leak": (
        decide(
            "batch = attrs.evolve(batch, inputs={**batch.inputs, 'lengths': batch.inputs['lengths'].sum()[None]}); "
            + OWN_DECIDE
        ),
        "test_log_probs_do_not_depend_on_what_else_is_packed",
        "log-probs change with what else is packed: sequences see one another",
    ),
    "order-forgotten": (
        pack("[attrs.evolve(batch, sequences=tuple(sorted(batch.sequences))) for batch in batches]"),
        "test_log_probs_do_not_depend_on_order_or_budget",
        "log-probs change with the order of the payloads",
    ),
    "dropout": (
        logprobs("own + 1e-3 * torch.rand_like(own)"),
        "test_the_same_micro_batch_gives_the_same_bits",
        "decide() gives other log-probs the second time",
    ),
    "rounded": (
        logprobs("own.bfloat16()"),
        "test_log_probs_are_float32_whatever_the_precision",
        "decide() gave log-probs of torch.bfloat16",
    ),
    "rounded-in-disguise": (
        logprobs("own.bfloat16().float() if torch.is_autocast_enabled('cpu') else own"),
        "test_log_probs_are_float32_whatever_the_precision",
        "with bfloat16 autocast every log-prob is a bfloat16 number",
    ),
    "entropy-unasked": (
        decide(OWN_DECIDE.replace("with_entropy=with_entropy", "with_entropy=True")),
        "test_the_entropy_is_given_where_asked_for",
        "decide(with_entropy=False) gave an entropy",
    ),
    "entropy-in-bits": (
        decide(f"{OWN_DECIDE}; decided = attrs.evolve(decided, entropy_N=with_entropy and decided.entropy_N / 0.693)"),
        "test_the_entropy_equals_the_reference",
        "entropies at temperature 1 are not those of the reference",
    ),
}
GRADIENTS = {
    "wrong-gradient": (
        logprobs("1.1 * own - 0.1 * own.detach()"),
        "test_gradients_are_those_of_the_log_probs",
        "the gradient of model.embed_tokens.weight is wrong: at temperature 0.6 it promises",
    ),
    "no-gradient": (
        logprobs("own.detach()"),
        "test_every_parameter_gets_a_gradient",
        "log-probs carry no gradient",
    ),
    "uncovered-parameter": (
        build(OWN_BUILD, "module.model.forgotten = torch.nn.Parameter(torch.ones(3, dtype=dtype))"),
        "test_every_parameter_gets_a_gradient",
        "1 parameters have no gradient, so no decision depends on them: model.forgotten",
    ),
    "gradient-times-temperature": (
        logprobs("temperature * own + (own - temperature * own).detach()"),
        "test_gradients_are_those_of_the_log_probs",
        "is wrong: at temperature 0.6 it promises",
    ),
    "detached-with-entropy": (
        logprobs("own.detach() if with_entropy else own"),
        "test_every_parameter_gets_a_gradient",
        "log-probs carry no gradient (decided with_entropy=True)",
    ),
    "rows-without-gradient": (
        build(
            OWN_BUILD,
            "mask = torch.ones_like(module.lm_head.weight)",
            "mask[::2] = 0",
            "module.lm_head.weight.register_hook(lambda gradient: gradient * mask)",
        ),
        "test_what_has_no_gradient_changes_nothing",
        "the gradient of lm_head.weight is cut: it is 0 for",
    ),
    "columns-without-gradient": (
        build(
            OWN_BUILD,
            "weight = module.model.layers[0].mlp.down_proj.weight",
            "mask = torch.ones_like(weight)",
            "mask[:, ::3] = 0",
            "weight.register_hook(lambda gradient: gradient * mask)",
        ),
        "test_what_has_no_gradient_changes_nothing",
        "the gradient of model.layers.0.mlp.down_proj.weight is cut: it is 0 for",
    ),
    "detached-under-autocast": (
        logprobs("own.detach() if torch.is_autocast_enabled('cpu') else own"),
        "test_gradients_under_autocast_are_nearly_the_same",
        "log-probs carry no gradient (decided with_entropy=True, under bfloat16 autocast)",
    ),
    "opposite-under-autocast": (
        logprobs("2 * own.detach() - own if torch.is_autocast_enabled('cpu') else own"),
        "test_gradients_under_autocast_are_nearly_the_same",
        "under bfloat16 autocast the gradient is off by",
    ),
    "averaged-gradient": (
        logprobs("own / len(batch.sequences) + (own - own / len(batch.sequences)).detach()"),
        "test_gradients_equal_those_of_each_sequence_alone",
        "changes with how sequences are packed",
    ),
}
WEIGHTS = {
    "two-names": (
        build(OWN_BUILD, "module.model.first = torch.nn.Parameter(module.model.norm.weight.detach()[:4])"),
        "test_the_shard_map_covers_each_parameter_exactly_once",
        "share memory, so the shard map covers it twice",
    ),
    "hidden-weight": (
        build(
            OWN_BUILD,
            "scale = 1 + seed / 10",
            "module.model.norm.register_forward_hook(lambda layer, inputs, output: output * scale)",
        ),
        "test_the_published_tensors_are_the_whole_model",
        "weights lie outside its parameters and persistent buffers",
    ),
    "wrong-sign": (
        logprobs("2 * own.detach() - own"),
        "test_a_training_step_changes_every_published_parameter",
        "imitating the payloads did not make them likelier",
    ),
    "export-forgets": (
        family(
            """
            def export(self, module, directory):
                from safetensors.torch import load_file, save_file
                super().export(module, directory)
                tensors = load_file(directory / "model.safetensors")
                del tensors["model.norm.weight"]
                save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
            """
        ),
        "test_the_export_holds_every_tensor",
        "the exported folder has no tensor model.norm.weight",
    ),
    "export-untrained": (
        family(
            """
            def export(self, module, directory):
                super().export(self.build(seed=0, dtype=torch.float32, device=torch.device("cpu")), directory)
            """
        ),
        "test_the_export_holds_every_tensor",
        "is not that of the module that export() was given",
    ),
    "export-pickles": (
        family(
            """
            def export(self, module, directory):
                super().export(module, directory)
                torch.save({}, directory / "extra.pt")
            """
        ),
        "test_the_export_holds_no_pickle",
        "export() wrote extra.pt",
    ),
    "path-rewritten": (
        build(OWN_BUILD, "if self.context.path: module.model.norm.weight.data.mul_(2)"),
        "test_the_exported_model_is_the_same_model",
        "a model from the exported folder has other weights: model.norm.weight",
    ),
    "path-has-other-facts": (
        facts("context_length=32 if self.context.path else 64"),
        "test_the_exported_model_encodes_the_same",
        "a model from the exported folder has other facts",
    ),
}
BUILDING = {
    "seed-ignored": (
        build(OWN_BUILD.replace("seed=seed", "seed=7")),
        "test_another_seed_gives_other_weights",
        "build(seed=0) and build(seed=1) give the same weights",
    ),
    "seed-not-alone": (
        build(OWN_BUILD.replace("seed=seed", "seed=seed + int(torch.randint(1000, ()))")),
        "test_one_seed_gives_the_same_weights_bit_for_bit",
        "build(seed=0) gives other weights the second time",
    ),
    "random-state": (
        build(OWN_BUILD, "torch.manual_seed(seed)"),
        "test_building_leaves_the_random_state_alone",
        "build() changes torch's global random state",
    ),
    "kept-module": (
        build("if not hasattr(self, 'kept'):", f"    {OWN_BUILD}", "    self.kept = module", "module = self.kept"),
        "test_two_modules_share_no_memory",
        "build() gave weights that an earlier module holds",
    ),
    "dtype-ignored": (
        build(OWN_BUILD.replace("dtype=dtype", "dtype=torch.float32")),
        "test_the_dtype_is_honoured[bfloat16]",
        "build(dtype=torch.bfloat16) made model.embed_tokens.weight as torch.float32",
    ),
    "facts-by-building": (
        facts("num_layers=len(self.build(seed=0, dtype=torch.float32, device=torch.device('cpu')).model.layers)"),
        "test_facts_are_found_without_building",
        "facts() allocates weights",
    ),
    "miscounted": (
        facts("num_parameters=facts.num_parameters + 1"),
        "test_facts_agree_with_the_module",
        "(tied parameters counted once)",
    ),
    "small-tokenizer": (
        facts("tokenizer_size=20"),
        "test_every_token_id_has_a_row_in_the_embedding",
        "and facts().tokenizer_size is 20; give the largest id of the tokenizer plus one",
    ),
    "large-vocabulary": (
        facts("vocab_size=10**6, tokenizer_size=10**6 - 1"),
        "test_every_token_id_has_a_row_in_the_embedding",
        "facts().vocab_size is 1000000, and the embedding has",
    ),
    "foreign-stop": (
        facts("stop_ids=frozenset({9999})"),
        "test_facts_hold_together",
        "facts() name stop or pad ids [9999] outside the tokenizer's",
    ),
}
PACKING = {
    "payload-lost": (
        pack("super().pack(payloads[:5], budget=budget)"),
        "test_each_payload_is_packed_exactly_once",
        "packed number 5 0 times, not once",
    ),
    "payload-repeated": (
        pack("batches + batches[:1] if len(payloads) > 1 else batches"),
        "test_each_payload_is_packed_exactly_once",
        "2 times, not once",
    ),
    "budget-ignored": (
        family("def pack(self, payloads, *, budget, **padding): return super().pack(payloads, budget=1 << 16)"),
        "test_a_payload_over_the_budget_is_refused",
        "raise DataError that names the payload and policy.micro_batch_units",
    ),
    "budget-doubled": (
        family("def pack(self, payloads, *, budget, **padding): return super().pack(payloads, budget=2 * budget)"),
        "test_no_micro_batch_exceeds_the_budget",
        "pack() made a micro-batch of",
    ),
    "units-not-counted": (
        pack("[attrs.evolve(batch, num_units=batch.num_units // len(batch.sequences)) for batch in batches]"),
        "test_decisions_and_units_are_counted_truly",
        "count every unit that the forward processes",
    ),
    "packing-with-a-memory": (
        family(
            """
            turn = 1

            def pack(self, payloads, *, budget, **padding):
                self.turn = -self.turn
                return super().pack(payloads, budget=budget)[:: self.turn]
            """
        ),
        "test_packing_is_deterministic",
        "pack() gives other micro-batches a second time",
    ),
    "something-from-nothing": (
        pack("batches or [None]"),
        "test_nothing_is_packed_into_nothing",
        "pack([]) gave 1 micro-batches",
    ),
    "own-memory-only": (
        pack("super().pack([p for p in payloads if isinstance(p.arrays['prompt'].data, bytes)], budget=budget)"),
        "test_payloads_in_received_memory_are_packed",
        "pack() gives other micro-batches for payloads that lie in read-only memory",
    ),
    "lists": (
        pack("[attrs.evolve(batch, inputs={**batch.inputs, 'sizes': [1, 2]}) for batch in batches]"),
        "test_inputs_are_tensors_on_the_cpu",
        "MicroBatch.inputs['sizes'] is list",
    ),
    "any-kind": (
        family(
            """
            def pack(self, payloads, *, budget, **padding):
                return super().pack([p for p in payloads if p.kind == "tokens"], budget=budget)
            """
        ),
        "test_a_kind_that_is_not_declared_is_refused",
        "pack() took a payload of kind 'no-model-takes-this'",
    ),
}
ENCODING = {
    "kind-never-made": (
        family(after="CAPABILITIES = ModelCapabilities(payload_kinds=frozenset({'tokens', 'media'}))"),
        "test_payloads_are_of_the_declared_kinds",
        "payload kinds media are declared, and no payload of the kit is of them",
    ),
    "other-conditioning": (
        demonstration("tokens_payload([7, *prompt], completion)"),
        "test_a_demonstration_begins_with_the_encoded_prompt",
        "has another array 'prompt' than encode() of the same row",
    ),
    "never-stops": (
        demonstration("tokens_payload(prompt, completion[:-1])"),
        "test_a_demonstration_ends_with_a_stop_id",
        "none of the stop ids [2] of facts()",
    ),
    "unfaithful-text": (
        family("def decode(self, payload): return super().decode(payload).upper()"),
        "test_a_demonstration_decodes_to_itself",
        "decode() gives 'TWENTY-ONE' for the demonstration 'Twenty-one'",
    ),
    "demonstration-made-up": (
        family(
            """
            def encode_demonstration(self, prompt):
                return super().encode_demonstration(attrs.evolve(prompt, demonstration=prompt.demonstration or ""))
            """
        ),
        "test_a_row_without_demonstration_is_a_data_error",
        "encode_demonstration() took a row without a demonstration",
    ),
    "empty-chat": (
        family(
            """
            def encode(self, prompt):
                return super().encode(prompt) if isinstance(prompt.text, str) else tokens_payload([])
            """
        ),
        "test_a_chat_is_encoded_or_refused",
        "encode() encodes a chat to no tokens",
    ),
    "hash-of-the-process": (
        family(
            """
            def encode(self, prompt):
                return tokens_payload([5 + hash("salt") % 200, *values(super().encode(prompt), "prompt")])
            """
        ),
        "test_another_process_encodes_packs_and_builds_the_same",
        "another process makes other encodings",
    ),
}
PADDING = {
    "multiple-ignored": (
        family(
            "def pack(self, payloads, *, budget, **padding): return super().pack(payloads, budget=budget)", axes("cp")
        ),
        "test_padded_micro_batches_have_the_sizes_asked_for",
        "pad each to a multiple",
    ),
    "not-uniform": (
        family(
            """
            def pack(self, payloads, *, budget, multiple=1, **padding):
                return super().pack(payloads, budget=budget, multiple=multiple)
            """,
            axes("pp"),
        ),
        "test_padded_micro_batches_have_the_sizes_asked_for",
        "pad all to one size",
    ),
    "padding-decides": (
        pack(
            "[attrs.evolve(b, num_decisions=(*b.num_decisions[:-1], b.num_decisions[-1] + 1)) for b in batches] "
            "if multiple > 1 else batches",
            axes("tp"),
        ),
        "test_padding_decides_nothing",
        "where the micro-batch is padded",
    ),
    "padding-is-seen": (
        pack(
            "[attrs.evolve(b, inputs={**b.inputs, 'lengths': b.inputs['lengths'].sum()[None]}) for b in batches] "
            "if multiple > 1 else batches",
            axes("tp"),
        ),
        "test_padding_decides_nothing",
        "let no sequence see padding",
    ),
}
COUNTING = """
    def build(self, *, seed, dtype, device, layout=None):
        module = super().build(seed=seed, dtype=dtype, device=device, layout=layout)
        self.tally = torch.zeros(1)
        return module

    def decide(self, module, batch, *, temperature, with_entropy=False):
        if {condition}:
            self.tally += batch.num_units
        return super().decide(module, batch, temperature=temperature, with_entropy=with_entropy)

    def tallies(self, module):
        return [{tally}]

    def after_step(self, module):
        {act}
        return {{"units_seen": {metric}}}
"""


def counting(condition="batch.weights_N is not None", tally="self.tally", act="pass", metric="float(self.tally)"):
    """A model that counts, somehow."""
    return family(COUNTING.format(condition=condition, tally=tally, act=act, metric=metric), axes("dp_shard"))


TALLIES = {
    "counts-copied": (
        counting(tally="self.tally.clone()"),
        "test_only_forwards_of_a_step_are_counted_from_zero",
        "after tallies() were zeroed; give the tensors, never copies",
    ),
    "always-counting": (
        counting(condition="True"),
        "test_only_forwards_of_a_step_are_counted_from_zero",
        "a forward without weights_N is counted",
    ),
    "counted-in-integers": (
        counting(tally="self.tally.long()"),
        "test_only_forwards_of_a_step_are_counted_from_zero",
        "tallies() gave torch.int64",
    ),
    "acting-on-weights": (
        counting(act="module.model.norm.weight.data.mul_(1.01)"),
        "test_acting_on_counts_leaves_trained_parameters_alone",
        "after_step() changed model.norm.weight, which has a gradient",
    ),
    "reporting-nothing": (
        counting(metric="float('nan')"),
        "test_acting_on_counts_leaves_trained_parameters_alone",
        "after_step() reports units_seen = nan",
    ),
}
LAYOUTS = {
    "unknown-axis": (
        family(after=axes("zp")),
        "test_declared_mesh_axes_equal_one_process",
        "ModelCapabilities.mesh_axes names zp; the axes are pp, dp_replicate",
    ),
    "gradient-not-summed": (
        build(
            OWN_BUILD,
            "if layout is not None and layout.mesh.size('tp') > 1:",
            "    module.model.norm.weight.register_hook(lambda gradient: gradient / 2)",
            after=axes("tp"),
        ),
        "test_declared_mesh_axes_equal_one_process",
        "with tp = 2 the gradient of model.norm.weight differs from one process's by 0.5 of its norm",
    ),
    "gradient-summed-twice": (
        logprobs("2 * own - own.detach() if torch.distributed.is_initialized() else own", after=axes("dp_shard")),
        "test_declared_mesh_axes_equal_one_process",
        "with dp_shard = 2 the gradient of",
    ),
    "loss-scaled": (
        logprobs("own / 2 if torch.distributed.is_initialized() else own", after=axes("dp_replicate")),
        "test_declared_mesh_axes_equal_one_process",
        "with dp_replicate = 2 the loss is",
    ),
    "other-counts": (
        counting(metric="float(self.tally) + torch.distributed.is_initialized()"),
        "test_declared_mesh_axes_equal_one_process",
        "with dp_shard = 2 the units_seen of after_step() is",
    ),
    "own-decisions-only": (
        logprobs("own[: len(own) // 2] if torch.distributed.is_initialized() else own", after=axes("cp")),
        "test_declared_mesh_axes_equal_one_process",
        "every process that shares the sequences returns all of their decisions",
    ),
    "other-things-said": (
        logprobs("own + torch.distributed.get_rank() if torch.distributed.is_initialized() else own", after=axes("tp")),
        "test_declared_mesh_axes_equal_one_process",
        "decide() gives other log-probs on rank",
    ),
    "other-weights": (
        build(
            OWN_BUILD,
            "if layout is not None and layout.mesh.size('tp') > 1: module.model.norm.weight.data.mul_(2)",
            after=axes("tp"),
        ),
        "test_declared_mesh_axes_equal_one_process",
        "with tp = 2 build() makes other weights: model.norm.weight",
    ),
    "no-stages": (
        family("stages = conclude = None", axes("pp")),
        "test_declared_mesh_axes_equal_one_process",
        "declares pp, and the model has no method stages, conclude",
    ),
    "passing-views-on": (
        family(
            """
            def advance(self, stage, batch, received):
                return super().advance(stage, batch, received)[:]
            """,
            axes("pp"),
        ),
        "test_declared_mesh_axes_equal_one_process",
        "advance() gave a view",
    ),
}
PLANTED = {**DECISIONS, **GRADIENTS, **WEIGHTS, **BUILDING, **PACKING, **PADDING, **ENCODING, **TALLIES, **LAYOUTS}

HEADER = """
import numpy as np
from faulty_model_latent import SIGMA, Decided, Payload, array, load_file, torch, view
from cosmos_core.types import Prompt

TINY = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3,
}
"""
LATENT = (Path(__file__).parent / "latent_model.py").read_text()
# What the author of a model without tokens adds: rows without demonstrations, paths, and what their steps should be.
LATENT_BODY = """
config = {"width": 4}
tokenizer = None

@pytest.fixture
def prompts(self):
    return [Prompt(text="a red ball"), Prompt(text="rain")]

@pytest.fixture
def payloads(self, model, prompts):
    generator = np.random.default_rng(0)
    paths = [array(generator.normal(size=(steps + 1, 4))) for steps in (3, 7)]
    encoded = [model.encode(prompt) for prompt in prompts]
    return [Payload(kind="latents", arrays={**e.arrays, "path": path}) for e, path in zip(encoded, paths)]

def reference(self, model, module, payloads, *, temperature):
    return [self.one(module, view(p, "path"), view(p, "condition"), temperature) for p in payloads]

def one(self, module, path, condition, temperature):
    mean = torch.tanh(path[:-1] @ module.state.weight.T + module.state.bias + module.condition.weight @ condition)
    steps = torch.distributions.Normal(mean, SIGMA * temperature**0.5)
    return Decided(logprobs_N=steps.log_prob(path[1:]).sum(-1).detach(), entropy_N=steps.entropy().sum(-1).detach())

def load_exported(self, directory):
    return load_file(directory / "model.safetensors")
"""
UNDECLARED = {
    "not declared: none of cp, tp and pp, for which micro-batches are padded",
    "not declared: with these options the model counts nothing (`AfterStep`)",
    "not declared: no axis of [policy.mesh]",
}
UNDECLARED_TESTS = {
    "test_padded_micro_batches_have_the_sizes_asked_for",
    "test_padding_decides_nothing",
    "test_only_forwards_of_a_step_are_counted_from_zero",
    "test_acting_on_counts_leaves_trained_parameters_alone",
    "test_declared_mesh_axes_equal_one_process",
}
TESTS = [name for name in dir(ModelConformance) if name.startswith("test_")]


def only(test):
    """A class body that leaves one test of the kit: so many plugins would take minutes with all of it."""
    return "".join(f"{name} = None\n" for name in TESTS if name != test.partition("[")[0])


@pytest.fixture(scope="module")
def outcomes(run_kit):
    good = {"good": family(after=axes("tp", "cp", "pp", "dp_shard")), "counting": counting()}
    modules = {**good, "latent": LATENT, **{name: source for name, (source, *_) in PLANTED.items()}}
    bodies = {name: only(test) for name, (_, test, _) in PLANTED.items()}
    bodies.update({name: bodies[name] + "config = {**TINY, 'num_hidden_layers': 2}\n" for name in LAYOUTS})
    bodies["good"] = "config = {**TINY, 'num_hidden_layers': 2}\n"
    bodies["tame"] += "config = {**TINY, 'initializer_range': 0.01}\n"
    return run_kit("model", modules, header=HEADER, body="config = TINY\n", bodies={**bodies, "latent": LATENT_BODY})


@pytest.mark.parametrize("name", ["good", "counting"])
def test_a_good_language_model_passes(outcomes, name):
    rest = {each.test: each.message for each in outcomes[name] if each.result != "passed"}
    assert set(rest.values()) <= UNDECLARED


def test_a_good_model_without_tokens_passes(outcomes):
    rest = {each.test: each.message for each in outcomes["latent"] if each.result != "passed"}
    assert rest.pop("test_every_token_id_has_a_row_in_the_embedding").startswith(
        "not given: none of the kit's payloads"
    )
    assert {rest.pop(name) for name in UNDECLARED_TESTS} == UNDECLARED
    assert rest.keys() == {each.test for each in outcomes["latent"] if each.test.startswith("test_a_demonstration_")}
    assert set(rest.values()) == {"not given: no row of `prompts` has a demonstration"}


@pytest.mark.parametrize("name", PLANTED)
def test_the_fault_is_named(outcomes, name):
    _, test, message = PLANTED[name]
    failed = {each.test: each.message for each in outcomes[name] if each.result == "failed"}
    assert message in failed[test]


def test_an_axis_that_planning_takes_is_named(monkeypatch):
    # No plugin can make planning take an axis that it does not declare.
    monkeypatch.setattr(declarations, "undeclared", lambda sizes, axes: [])
    with pytest.raises(pytest.fail.Exception, match=r"policy\.mesh\.pp = 2 is taken"):
        type("Kit", (ModelConformance,), {"plugin": "any"})().test_undeclared_mesh_axes_are_refused(ModelCapabilities())


def test_every_test_of_the_kit_can_fail():
    planted = {test.partition("[")[0] for _, test, _ in PLANTED.values()}
    # Those of every kind are proven with rewards (test_options_faults), and refusing an axis above.
    elsewhere = {name for name in TESTS if name in vars(PluginConformance)} | {"test_undeclared_mesh_axes_are_refused"}
    assert set(TESTS) - elsewhere == planted
