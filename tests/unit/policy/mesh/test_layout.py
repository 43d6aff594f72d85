import itertools
import re

import attrs
import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.errors import ConfigError
from cosmos_core.models.parallel.stages import layer_spans, stage_indices
from cosmos_core.policy.mesh.layout import misfits
from cosmos_core.protocols import ModelCapabilities, ModelFacts
from cosmos_core.protocols.facts import Extent, ModelPart

ALL = frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"})
FACTS = ModelFacts(
    architecture="Tiny",
    num_parameters=1000,
    num_layers=6,
    hidden_size=8,
    vocab_size=30_000,
    tokenizer_size=30_000,
    context_length=64,
    stop_ids=frozenset(),
    pad_id=0,
    extents=(
        Extent(axis="tp", name="attention heads", size=8),
        Extent(axis="tp", name="key-value heads", size=2, is_shared=True),
        Extent(axis="cp", name="attention heads", size=8),
        Extent(axis="ep", name="experts", size=12),
    ),
)


def found(mesh, *, axes=ALL, facts=FACTS, **policy):
    recipe = recipe_from(
        {
            "run": {"name": "demo", "steps": 1},
            "model": {"plugin": "hf", "path": "x"},
            "algorithm": {"plugin": "grpo"},
            "dataset": {"plugin": "numbers"},
            "policy": {"optimizer": {"lr": 1e-6}, "prompts_per_step": 64, "mesh": mesh, **policy},
        }
    )
    return misfits(recipe.policy, ModelCapabilities(mesh_axes=axes), facts)


def test_what_fits_is_taken():
    for mesh in [
        {},
        {"tp": 2, "cp": 3, "dp_shard": 2, "pp": 6},
        {"tp": 8},  # four processes share a key-value head
        {"dp_shard": 24, "ep": 6},
    ]:
        assert found(mesh, micro_batch_units=8190 if "cp" in mesh else 8192) == []


def test_each_refusal_names_the_number_and_what_would_work():
    for mesh, policy, message in [
        ({"tp": 3}, {}, r"policy.mesh.tp: 3 does not divide 8 attention heads; tp can be 1, 2, 4 or 8"),
        ({"dp_shard": 8, "ep": 8}, {}, r"policy.mesh.ep: 8 does not divide 12 experts; ep can be 1, 2, 3, 4, 6 or 12"),
        ({"dp_shard": 4, "ep": 3}, {}, r"policy.mesh.ep: 3 does not divide .* = 4.*ep can be 1, 2 or 4"),
        ({"dp_shard": 2, "tp": 2, "ep": 8}, {}, r"policy.mesh.ep: 8 does not divide .* = 4.*ep can be 1, 2 or 4"),
        ({"dp_shard": 3, "tp": 2, "ep": 3}, {}, r"policy.mesh.ep: 3 is not a multiple of tp = 2.*can be 1, 2 or 6"),
        ({"pp": 7}, {}, r"policy.mesh.pp: pp = 7 makes 7 stages of 6 layers; pp can be at most 6"),
        ({"pp": 4}, {"parallel": {"schedule": "interleaved"}}, r"2 stages a process .* 8 stages of 6.*at most 3"),
        (
            {"tp": 2, "cp": 3},
            {"parallel": {"context": "ulysses"}, "micro_batch_units": 6000},
            r"cp: 3 does not divide the 4 attention heads of each process .*cp can be 1, 2 or 4, or .*gather",
        ),
        (
            {"tp": 2, "cp": 2},
            {"micro_batch_units": 1001},
            r"micro_batch_units: 1001 is no multiple of .* = 4.*1000 or 1004",
        ),
    ]:
        problems = found(mesh, **policy)
        assert any(re.search(message, problem) for problem in problems), problems


def test_a_model_that_only_exchanges_heads_is_spread_over_no_more():
    heads, tokens = Extent(axis="cp", name="attention heads", size=8), Extent(axis="cp", name="tokens", size=12)
    facts = attrs.evolve(FACTS, vocab_size=0, context_methods=frozenset({"ulysses"}), extents=(heads, tokens))
    for context, cp in itertools.product(["auto", "ulysses"], range(1, 13)):
        problems = found({"cp": cp}, facts=facts, parallel={"context": context})
        assert bool(problems) == (cp not in {1, 2, 4})
    (problem,) = problems
    assert problem.startswith("policy.mesh.cp: 12 does not divide the 8 attention heads, which 'ulysses' ")
    assert problem.endswith("needs; cp can be 1, 2 or 4")
    for context in ["gather", "ring"]:
        (problem,) = found({"cp": 2}, facts=facts, parallel={"context": context})
        assert problem.startswith(
            f"policy.parallel.context: '{context}', but Tiny has attention over cp by ulysses only"
        )
        assert found({}, facts=facts, parallel={"context": context}) == []


def test_an_axis_that_is_not_declared_is_refused_first():
    (problem,) = found({"tp": 3}, axes=frozenset({"dp_shard"}))
    assert re.search(r"policy.mesh.tp: 3, but the model's plugin does not declare.*can use dp_shard", problem)
    (problem,) = found({"cp": 2}, axes=frozenset())
    assert "trains in one process only" in problem


def test_an_axis_that_makes_no_sense_is_refused_with_the_models_reason():
    facts = attrs.evolve(FACTS, impossible={"cp": "its state passes from unit to unit"})
    (problem,) = found({"cp": 2}, facts=facts)
    assert re.search(r"policy.mesh.cp: 2, but Tiny cannot be .* over cp: its state passes .*; set cp = 1", problem)


def test_a_model_without_experts_says_so_before_anything_is_divided():
    for dp_shard in [1, 6, 8]:
        for axes in [ALL, ALL - {"ep"}]:
            facts = attrs.evolve(FACTS, extents=(), impossible={"ep": "it has no experts"})
            problems = found({"dp_shard": dp_shard, "ep": 3}, axes=axes, facts=facts)
            assert problems == ["policy.mesh.ep: 3, but Tiny cannot be spread over ep: it has no experts; set ep = 1"]


def test_what_is_offered_fits_and_nothing_else_does():
    for tp in range(2, 10):
        fitting = [size for size in range(1, 65) if not [each for each in found({"tp": size}) if "mesh.tp" in each]]
        for problem in found({"tp": tp}):
            if "mesh.tp" in problem:
                assert problem.endswith("tp can be 1, 2, 4 or 8")
        assert fitting == [1, 2, 4, 8]


def test_a_first_stage_without_the_layers_that_it_adds_to_is_refused():
    for mesh, parallel, message in [
        ({"pp": 3}, {}, r"first stage needs 3 layers, and of 3 it has 2; there can be at most 2$"),
        ({"pp": 2}, {"schedule": "interleaved"}, r"needs 3 layers, and of 4 it has 1; there can be at most 2"),
        (
            {"pp": 2, "tp": 2},
            {},
            r"needs 3 layers and one more .*, and of 2 it has 3; there can be at most 1, or set .* = false$",
        ),
    ]:
        facts = attrs.evolve(FACTS, num_leading_layers=3)
        (problem,) = found(mesh, facts=facts, parallel=parallel)
        assert re.search(message, problem)
        assert found(mesh, parallel=parallel) == []


def test_a_first_stage_with_the_layers_that_it_adds_to_is_taken():
    facts = attrs.evolve(FACTS, num_leading_layers=3)
    assert found({"pp": 2}, facts=facts) == []
    assert found({"tp": 2}, facts=facts) == []
    assert found({"pp": 2, "tp": 2}, facts=facts, parallel={"sequence_parallel": False}) == []


def test_a_vocabulary_of_which_a_process_would_have_nothing_is_refused():
    facts = attrs.evolve(FACTS, vocab_size=9)
    (problem,) = found({"tp": 8}, facts=facts)
    assert re.search(r"policy.mesh.tp: 8 leaves processes without a token of a vocabulary of 9, .* takes 2", problem)
    assert found({"tp": 2}, facts=facts) == []


def test_uneven_parts_of_a_vocabulary_that_cannot_be_sharded_again_are_refused():
    facts = attrs.evolve(FACTS, vocab_size=301)
    (problem,) = found({"tp": 2, "dp_shard": 3}, facts=facts)
    assert "the 301 tokens of the vocabulary are split unevenly over tp = 2" in problem
    assert "set dp_shard · cp = 1, take a tp that divides 301, or raise vocab_size in [model.config] to 302" in problem
    assert found({"tp": 2, "dp_shard": 2}, facts=facts) == []
    assert found({"tp": 2, "dp_shard": 3}, facts=attrs.evolve(FACTS, vocab_size=302)) == []


def test_adapters_of_layers_that_are_not_there_are_refused():
    layer = ModelPart(name="layers", is_layer=True, num_parameters=9, widths={"q_proj": 8, "v_proj": 8})
    facts = attrs.evolve(FACTS, parts=(layer,))
    (problem,) = found({}, facts=facts, lora={"modules": ["q_proj", "v_prj"]})
    assert problem == ("policy.lora.modules: no linear layer of Tiny is called 'v_prj'; did you mean v_proj?")
    assert found({}, facts=facts, lora={"modules": ["all-linear"]}) == []


LINEARS = frozenset({"model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj", "lm_head"})


def test_float8_that_skips_nothing_or_everything_is_refused():
    for skip, message in [
        (
            ["lm_head", "down_prj"],
            r"policy\.float8\.skip: no linear layer of Tiny has 'down_prj' in .*mean down_proj\?$",
        ),
        (["self_attn", "mlp", "lm_head"], r"policy\.float8\.skip: .* leaves none of the 3 linear layers of Tiny"),
    ]:
        facts = attrs.evolve(FACTS, linear_layers=LINEARS)
        (problem,) = found({}, facts=facts, float8={"scaling": "rowwise", "skip": skip})
        assert re.search(message, problem)
        assert found({}, facts=facts, float8={"skip": skip}) == []


def test_float8_that_skips_some_layers_is_taken():
    facts = attrs.evolve(FACTS, linear_layers=LINEARS)
    assert found({}, facts=facts, float8={"scaling": "tensorwise", "skip": ["lm_head", "self_attn"]}) == []


def test_stages_of_each_process():
    for per_process, is_v_shaped, held in [
        (1, False, [(0,), (1,), (2,), (3,)]),
        (2, False, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (2, True, [(0, 7), (1, 6), (2, 5), (3, 4)]),
    ]:
        assert held == [
            stage_indices(size=4, place=place, per_process=per_process, is_v_shaped=is_v_shaped) for place in range(4)
        ]


def test_layers_are_spread_evenly_and_the_middle_takes_the_rest():
    for num_layers, sizes in ((8, [2, 2, 2, 2]), (9, [2, 3, 2, 2]), (11, [3, 3, 3, 2]), (4, [1, 1, 1, 1])):
        spans = layer_spans(num_layers, 4)
        assert [len(span) for span in spans] == sizes
        assert list(itertools.chain(*spans)) == list(range(num_layers))


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match=r"policy\.mesh\.pp: 8 pipeline stages .* the model has 6; lower pp"):
        layer_spans(6, 8)
