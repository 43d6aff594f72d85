"""Faults of models that the kit must name: one good language model, one good latent model, and many wrong ones."""

from pathlib import Path

import pytest

from cosmos_core.testing.conformance.plugin import PluginConformance
from tests.nightly.kit.faulty_family import (
    COMPARING_TESTS,
    FORWARD_TESTS,
    LAYOUT_TESTS,
    OWN_BUILD,
    OWN_DECIDE,
    TESTS,
    TINY,
    WORLD_TESTS,
    build,
    decide,
    demonstration,
    facts,
    family,
    logprobs,
    only,
    pack,
    unnamed,
)

pytestmark = pytest.mark.slow

DECISIONS = {
    "wrong-scale": (
        decide(OWN_DECIDE.replace("temperature=temperature", "temperature=temperature * 1.02")),
        "test_decisions_equal_the_reference",
        "log-probs at temperature 1 are not those of the reference; payload",
    ),
    "temperature-ignored": (
        decide(OWN_DECIDE.replace("temperature=temperature", "temperature=1.0")),
        "test_decisions_equal_the_reference",
        "log-probs at temperature 0.6 are not those of the reference",
    ),
    "tame": (
        family(),
        "test_decisions_equal_the_reference",
        "set initializer_range = 0.2 in its config",
    ),
    "packing-leak": (
        decide(
            "batch = attrs.evolve(batch, inputs={**batch.inputs, 'lengths': batch.inputs['lengths'].sum()[None]}); "
            + OWN_DECIDE
        ),
        "test_log_probs_do_not_depend_on_how_payloads_are_packed",
        "log-probs change with what else is packed",
    ),
    "order-forgotten": (
        pack("[attrs.evolve(batch, sequences=tuple(sorted(batch.sequences))) for batch in batches]"),
        "test_log_probs_do_not_depend_on_how_payloads_are_packed",
        "or decisions are not in the order of batch.sequences",
    ),
    "dropout": (
        logprobs("own + 1e-3 * torch.rand_like(own)"),
        "test_log_probs_do_not_depend_on_how_payloads_are_packed",
        "decide() gives other log-probs the second time",
    ),
    "rounded": (
        logprobs("own.bfloat16()"),
        "test_log_probs_are_float32_whatever_the_precision",
        "logprobs_N of decide({}) is torch.bfloat16",
    ),
    "rounded-in-disguise": (
        logprobs("own.bfloat16().float() if torch.is_autocast_enabled('cpu') else own"),
        "test_log_probs_are_float32_whatever_the_precision",
        "with bfloat16 autocast every log-prob is a bfloat16 number",
    ),
    "entropy-unasked": (
        decide(OWN_DECIDE.replace("with_entropy=with_entropy", "with_entropy=True")),
        "test_what_is_asked_for_is_given_and_nothing_else",
        "decide({}) gave entropy_N, logprobs_N; give",
    ),
    "entropy-in-bits": (
        decide(
            f"{OWN_DECIDE}; own = decided.entropy_N; "
            "decided = attrs.evolve(decided, entropy_N=own if own is None else own / 0.693)"
        ),
        "test_decisions_equal_the_reference",
        "entropies at temperature 1 are not those of the reference",
    ),
}
GRADIENTS = {
    "wrong-gradient": (
        logprobs("1.1 * own - 0.1 * own.detach()"),
        "test_gradients_are_those_of_the_log_probs",
        "is wrong: at temperature 0.6 it promises",
    ),
    "no-gradient": (
        logprobs("own.detach()"),
        "test_gradients_are_those_of_the_log_probs",
        "carries no gradient",
    ),
    "uncovered-parameter": (
        build(OWN_BUILD, "module.model.forgotten = torch.nn.Parameter(torch.ones(3, dtype=dtype))"),
        "test_gradients_are_those_of_the_log_probs",
        "1 parameters have no gradient, so no decision uses them: model.forgotten",
    ),
    "gradient-times-temperature": (
        logprobs("temperature * own + (own - temperature * own).detach()"),
        "test_gradients_are_those_of_the_log_probs",
        "is wrong: at temperature 0.6 it promises",
    ),
    "detached-with-entropy": (
        logprobs("own.detach() if with_entropy else own"),
        "test_gradients_are_those_of_the_log_probs",
        "logprobs_N of decide({'with_entropy': True}) carries no gradient",
    ),
    "rows-without-gradient": (
        build(
            OWN_BUILD,
            "mask = torch.ones_like(module.lm_head.weight)",
            "mask[::2] = 0",
            "module.lm_head.weight.register_hook(lambda gradient: gradient * mask)",
        ),
        "test_gradients_are_those_of_the_log_probs",
        "the gradient of lm_head.weight, 0 for",
    ),
    "columns-without-gradient": (
        build(
            OWN_BUILD,
            "weight = module.model.layers[0].mlp.down_proj.weight",
            "mask = torch.ones_like(weight)",
            "mask[:, ::3] = 0",
            "weight.register_hook(lambda gradient: gradient * mask)",
        ),
        "test_gradients_are_those_of_the_log_probs",
        "the gradient of model.layers.0.mlp.down_proj.weight, 0 for",
    ),
    "detached-under-autocast": (
        logprobs("own.detach() if torch.is_autocast_enabled('cpu') else own"),
        "test_gradients_do_not_depend_on_precision",
        "logprobs_N of decide({'with_entropy': True}) carries no gradient",
    ),
    "opposite-under-autocast": (
        logprobs("2 * own.detach() - own if torch.is_autocast_enabled('cpu') else own"),
        "test_gradients_do_not_depend_on_precision",
        "under bfloat16 autocast the gradient is off by",
    ),
    "averaged-gradient": (
        logprobs("own / len(batch.sequences) + (own - own / len(batch.sequences)).detach()"),
        "test_gradients_are_those_of_the_log_probs",
        "is wrong: at temperature 0.6 it promises",
    ),
}
WEIGHTS = {
    "two-names": (
        build(OWN_BUILD, "module.model.first = torch.nn.Parameter(module.model.norm.weight.detach()[:4])"),
        "test_the_published_tensors_are_the_whole_model",
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
        "test_training_changes_every_published_parameter",
        "imitating the payloads did not make them likelier",
    ),
    "export-forgets": (
        family(
            """
            def export(self, module, directory, *, dtype=None):
                from safetensors.torch import load_file, save_file
                super().export(module, directory, dtype=dtype)
                tensors = load_file(directory / "model.safetensors")
                del tensors["model.norm.weight"]
                save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
            """
        ),
        "test_the_exported_model_is_the_same_model",
        "the exported folder has no tensor model.norm.weight",
    ),
    "export-untrained": (
        family(
            """
            def export(self, module, directory, *, dtype=None):
                module = self.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
                return super().export(module, directory, dtype=dtype)
            """
        ),
        "test_the_exported_model_is_the_same_model",
        "is not that of the module that export() was given",
    ),
    "export-pickles": (
        family(
            """
            def export(self, module, directory, *, dtype=None):
                super().export(module, directory, dtype=dtype)
                torch.save({}, directory / "extra.pt")
            """
        ),
        "test_the_exported_model_is_the_same_model",
        "export() wrote extra.pt",
    ),
    "export-in-its-own-dtype": (
        family(
            """
            def export(self, module, directory, *, dtype=None):
                return super().export(module, directory)
            """
        ),
        "test_an_export_has_the_dtype_asked_for_or_the_checkpoints",
        "export(dtype=torch.bfloat16) returns (torch.float32,); return the dtypes written",
    ),
    "export-makes-its-folder": (
        family(
            """
            def export(self, module, directory, *, dtype=None):
                directory.mkdir()
                return super().export(module, directory, dtype=dtype)
            """
        ),
        "test_the_exported_model_is_the_same_model",
        "export() fails in a folder that its caller has made, and that is empty: FileExistsError",
    ),
    "path-rewritten": (
        build(OWN_BUILD, "if self.context.path: module.model.norm.weight.data.mul_(2)"),
        "test_the_exported_model_is_the_same_model",
        "a model from the exported folder has other weights: model.norm.weight",
    ),
    "path-has-other-facts": (
        facts("context_length=32 if self.context.path else 64"),
        "test_the_exported_model_is_the_same_model",
        "a model from the exported folder has other facts",
    ),
}
BUILDING = {
    "seed-ignored": (
        build(OWN_BUILD.replace("seed=seed", "seed=7")),
        "test_the_seed_alone_decides_the_weights",
        "build(seed=0) and build(seed=1) give the same weights",
    ),
    "seed-not-alone": (
        build(OWN_BUILD.replace("seed=seed", "seed=seed + int(torch.randint(1000, ()))")),
        "test_the_seed_alone_decides_the_weights",
        "build(seed=0) gives other weights the second time",
    ),
    "random-state": (
        build(OWN_BUILD, "torch.manual_seed(seed)"),
        "test_the_seed_alone_decides_the_weights",
        "build() changes torch's global random state",
    ),
    "kept-module": (
        build("if not hasattr(self, 'kept'):", f"    {OWN_BUILD}", "    self.kept = module", "module = self.kept"),
        "test_the_seed_alone_decides_the_weights",
        "build() gave weights that an earlier module holds",
    ),
    "dtype-ignored": (
        build(OWN_BUILD.replace("dtype=dtype", "dtype=torch.float32")),
        "test_the_seed_alone_decides_the_weights",
        "build(dtype=torch.bfloat16) made model.embed_tokens.weight as torch.float32",
    ),
    "facts-by-building": (
        facts("num_layers=len(self.build(seed=0, dtype=torch.float32, device=torch.device('cpu')).model.layers)"),
        "test_facts_are_those_of_the_module",
        "facts() allocates weights",
    ),
    "miscounted": (
        facts("num_parameters=facts.num_parameters + 1"),
        "test_facts_are_those_of_the_module",
        "(tied parameters counted once)",
    ),
    "matrix-of-another-name": (
        facts("matrices={'layers.0.mlp.up_proj.weight': (4, 4)}"),
        "test_facts_are_those_of_the_module",
        "and the module has no such tensor; name [..., rows, columns]",
    ),
    "small-tokenizer": (
        facts("tokenizer_size=20"),
        "test_facts_are_those_of_the_module",
        "and facts().tokenizer_size is 20; give the largest id of the tokenizer plus one",
    ),
    "large-vocabulary": (
        facts("vocab_size=10**6, tokenizer_size=10**6 - 1"),
        "test_facts_are_those_of_the_module",
        "facts().vocab_size is 1000000, and the embedding has",
    ),
    "foreign-stop": (
        facts("stop_ids=frozenset({9999})"),
        "test_facts_are_those_of_the_module",
        "the stop or pad ids of facts(), have ids [9999]",
    ),
}
PACKING = {
    "payload-lost": (
        pack("super().pack(payloads[:5], budget=budget)"),
        "test_each_payload_is_packed_once_within_the_budget",
        "decisions is packed as nothing",
    ),
    "payload-repeated": (
        pack("batches + batches[:1] if len(payloads) > 1 else batches"),
        "test_each_payload_is_packed_once_within_the_budget",
        "give every decision once",
    ),
    "budget-doubled-alone": (
        family(
            """
            def pack(self, payloads, *, budget, **padding):
                return super().pack(payloads, budget=budget * (3 - min(len(payloads), 2)))
            """
        ),
        "test_each_payload_is_packed_once_within_the_budget",
        "raise DataError that names the payload and policy.micro_batch_units",
    ),
    "budget-doubled": (
        family("def pack(self, payloads, *, budget, **padding): return super().pack(payloads, budget=2 * budget)"),
        "test_each_payload_is_packed_once_within_the_budget",
        "pack() made a micro-batch of",
    ),
    "units-not-counted": (
        pack("[attrs.evolve(batch, num_units=batch.num_units // len(batch.sequences)) for batch in batches]"),
        "test_each_payload_is_packed_once_within_the_budget",
        "count every unit of the forward",
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
        "test_packing_depends_on_the_payloads_alone",
        "pack() gives other micro-batches a second time",
    ),
    "something-from-nothing": (
        pack("batches or [None]"),
        "test_packing_depends_on_the_payloads_alone",
        "pack([]) gave 1 micro-batches",
    ),
    "own-memory-only": (
        pack("super().pack([p for p in payloads if isinstance(p.arrays['prompt'].data, bytes)], budget=budget)"),
        "test_packing_depends_on_the_payloads_alone",
        "pack() gives other micro-batches for payloads that lie in read-only memory",
    ),
    "lists": (
        pack("[attrs.evolve(batch, inputs={**batch.inputs, 'sizes': [1, 2]}) for batch in batches]"),
        "test_packing_depends_on_the_payloads_alone",
        "MicroBatch.inputs['sizes'] is list",
    ),
    "any-kind": (
        family(
            """
            def pack(self, payloads, *, budget, **padding):
                return super().pack([p for p in payloads if p.kind == "tokens"], budget=budget)
            """
        ),
        "test_payloads_are_of_the_declared_kinds",
        "pack() took a payload of kind 'no-model-takes-this'",
    ),
}
ENCODING = {
    "kind-never-made": (
        family(after="CAPABILITIES = ModelCapabilities(payload_kinds=frozenset({'tokens', 'media'}))"),
        "test_payloads_are_of_the_declared_kinds",
        "and ['media', 'tokens'] is declared; make ModelCapabilities.payload_kinds",
    ),
    "other-conditioning": (
        demonstration("tokens_payload([7, *prompt], completion)"),
        "test_demonstrations_are_what_is_asked_for_and_answered",
        "has another array 'prompt' than encode() of the same row",
    ),
    "never-stops": (
        demonstration("tokens_payload(prompt, completion[:-1])"),
        "test_demonstrations_are_what_is_asked_for_and_answered",
        "none of the stop ids [2] of facts()",
    ),
    "unfaithful-text": (
        family("def decode(self, payload): return super().decode(payload).upper()"),
        "test_demonstrations_are_what_is_asked_for_and_answered",
        "decode() gives 'TWENTY-ONE' for the demonstration 'Twenty-one'",
    ),
    "demonstration-made-up": (
        family(
            """
            def encode_demonstration(self, prompt):
                return super().encode_demonstration(attrs.evolve(prompt, demonstration=prompt.demonstration or ""))
            """
        ),
        "test_demonstrations_are_what_is_asked_for_and_answered",
        "encode_demonstration() took a row without a demonstration",
    ),
    "empty-chat": (
        family(
            """
            def encode(self, prompt):
                return super().encode(prompt) if isinstance(prompt.text, str) else tokens_payload([])
            """
        ),
        "test_demonstrations_are_what_is_asked_for_and_answered",
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
OWN_TURNS = "super().encode_turns(prompt, written, turns)"


def observation(expression):
    """An `encode_turns` that gives something else than the family's own."""
    return family(f"def encode_turns(self, prompt, written, turns):\n    return {expression}")


CONVERSING = {
    "prices-observations": (
        family(
            """
            def pack(self, payloads, **how):
                bare = [
                    attrs.evolve(each, arrays={name: each.arrays[name] for name in each.arrays if name != "decided"})
                    for each in payloads
                ]
                return super().pack(bare, **how)
            """
        ),
        "test_only_what_was_decided_is_priced",
        "leave out those that the array `decided` says are not the model's",
    ),
    "forgets-observations": (
        observation("[]"),
        "test_words_of_others_are_kept_and_never_steer",
        "encode_turns() of '7 and How many apples now? 7+5=12' after 'How many?' decodes to ''",
    ),
    "lets-observations-steer": (
        observation('self.tokenizer(turns[0].content, add_special_tokens=False)["input_ids"]'),
        "test_words_of_others_are_kept_and_never_steer",
        "what an environment answers steers the model; encode its words as text",
    ),
    "raises-on-what-it-reads": (
        family(
            """
            def read_turn(self, prompt, ids):
                return super().read_turn(prompt, [ids[0], *ids[1:]])
            """
        ),
        "test_a_turn_is_read_whatever_it_says",
        "IndexError",
    ),
    "reads-stop-tokens-as-words": (
        family(
            """
            def read_turn(self, prompt, ids):
                read = super().read_turn(prompt, ids)
                return attrs.evolve(read, message=attrs.evolve(read.message, content=self.tokenizer.decode(ids)))
            """
        ),
        "test_a_turn_is_read_whatever_it_says",
        "has the content",
    ),
    "drops-what-would-steer": (
        observation(
            "super().encode_turns(prompt, written, "
            '[attrs.evolve(turn, content=turn.content.replace("<eos>", "")) for turn in turns])'
        ),
        "test_words_of_others_are_kept_and_never_steer",
        "after 'How many?' decodes to '7 and How many apples now? 7+5=12'; leave nothing out",
    ),
    "lets-users-steer": (
        family(
            """
            turn_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"

            def encode(self, prompt):
                if isinstance(prompt.text, str):
                    return super().encode(prompt)
                text = self.text.chat_text(prompt)
                return tokens_payload(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            """
        ),
        "test_words_of_others_are_kept_and_never_steer",
        "encode() of a chat whose user says '<pad>' has the token 0 of that name",
    ),
    "ends-its-turn-twice": (
        observation(f"[written[-1], *{OWN_TURNS}]"),
        "test_words_of_others_are_kept_and_never_steer",
        "with which the model has just ended its turn",
    ),
}
PLANTED = {**CONVERSING, **DECISIONS, **GRADIENTS, **WEIGHTS, **BUILDING, **PACKING, **ENCODING}


HEADER = """
import numpy as np
from faulty_model_latent import SIGMA, Decided, Payload, array, load_file, torch, view
from cosmos_core.types import Prompt

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
    made = [{"path": path, "times": array(np.ones(path.shape[0] - 1))} for path in paths]
    return [Payload(kind="latents", arrays={**e.arrays, **own}) for e, own in zip(encoded, made)]

def reference(self, model, module, payloads, *, temperature):
    return [self.one(module, view(p, "path"), view(p, "condition"), temperature) for p in payloads]

def one(self, module, path, condition, temperature):
    mean = torch.tanh(path[:-1] @ module.state.weight.T + module.state.bias + module.condition.weight @ condition)
    steps = torch.distributions.Normal(mean, SIGMA * temperature**0.5)
    return Decided(logprobs_N=steps.log_prob(path[1:]).sum(-1).detach(), entropy_N=steps.entropy().sum(-1).detach())

def load_exported(self, directory):
    return load_file(directory / "model.safetensors")
"""
NOT_COUNTED = "not declared: with these options the model counts nothing (`MoEModel`)"
NOT_RECORDED = "not declared: with these options the model records nothing (`MoEModel`)"
NOT_CONDITIONED = "not declared: prompts are token ids alone (`VisionModel`)"
NOT_SHOWN = "not declared: no other implementation takes what its prompts show (`VisionModel`)"
NOT_DECLARED = {
    "test_only_forwards_of_a_step_are_counted": NOT_COUNTED,
    "test_declared_mesh_axes_equal_one_process": "not declared: no axis that this model can be spread over",
    "test_training_on_its_own_records_changes_nothing": NOT_RECORDED,
    "test_each_unit_of_a_prompt_enters_by_the_weights": NOT_CONDITIONED,
    "test_each_image_or_video_is_shown_where_it_stands": NOT_SHOWN,
    "test_what_a_turn_shows_enters_where_it_stands_and_what_the_model_wrote_shows_nothing": (
        "not declared: turns show no images (`DialogueVision`)"
    ),
    **WORLD_TESTS,
}


REST = "the other checks of this test passed"
DEMONSTRATIONS = "test_demonstrations_are_what_is_asked_for_and_answered"


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = {"good": family(), "latent": LATENT, **{name: source for name, (source, *_) in PLANTED.items()}}
    bodies = {name: only(test) for name, (_, test, _) in PLANTED.items()}
    bodies["tame"] += "config = {**TINY, 'initializer_range': 0.01}\n"
    return run_kit(
        "model", modules, header=HEADER + TINY, body="config = TINY\n", bodies={**bodies, "latent": LATENT_BODY}
    )


def test_a_good_language_model_passes(outcomes):
    assert {each.test: each.message for each in outcomes["good"] if each.result != "passed"} == {
        **NOT_DECLARED,
        "test_words_of_others_are_kept_and_never_steer": f"not declared: the model takes no chats; {REST}",
        "test_a_turn_is_read_whatever_it_says": f"not declared: the model takes no chats; {REST}",
        "test_divergences_are_distances_that_their_gradient_shortens": "it declares no divergences",
    }


def test_a_good_model_without_tokens_passes(outcomes):
    rest = {each.test: each.message for each in outcomes["latent"] if each.result != "passed"}
    talks = {test for _, test, _ in CONVERSING.values()}
    assert rest == {
        **NOT_DECLARED,
        **dict.fromkeys(talks, "not declared: the model has no `encode_turns` (`MultiTurnModel`)"),
        DEMONSTRATIONS: f"not given: no row of `prompts` has a demonstration; {REST}",
    }


def test_every_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}


def test_every_test_of_the_kit_can_fail():
    planted = {test for _, test, _ in PLANTED.values()}
    # Those of every kind are proven with rewards (test_options_faults), those of many processes in test_layout_faults,
    # those of what engines run themselves in test_forward_faults, those of divergences in test_comparing_faults, those
    # of world models in test_world_faults.
    elsewhere = {name for name in TESTS if name in vars(PluginConformance)} | LAYOUT_TESTS | FORWARD_TESTS
    elsewhere |= COMPARING_TESTS | WORLD_TESTS.keys()
    assert set(TESTS) == planted | elsewhere
