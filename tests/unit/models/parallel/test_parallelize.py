"""Tiny models of several architectures on meshes, against one process."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import ConfigError, PluginIncompatibleError
from cosmos_core.models.parallel.forwards import within
from cosmos_core.models.parallel.parallelize import _style, parallelize
from cosmos_core.models.parallel.plan import plan_for
from cosmos_core.models.parallel.stages import Part
from cosmos_core.models.parallel.tensor import Tensor, apply_style
from cosmos_core.policy.mesh.mesh import form_mesh, single
from cosmos_core.protocols import Layout
from cosmos_core.testing.worlds import run_world
from tests.unit.models.parallel import layouts

FSDP = {"dp_shard": 2}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
TP = {"tp": 2}
BOTH = {"dp_shard": 2, "tp": 2}
WHOLE_SEQUENCE = {"sequence_parallel": False}
TIED = {"tie_word_embeddings": True}


@functools.cache
def reference(kind, changes):
    return layouts.reference(kind, **dict(changes))


def outcomes(kind, sizes, options=None, changes=None, overrides=None):
    changes = changes or {}
    expected = reference(kind, tuple(changes.items()))
    count = math.prod(size for axis, size in sizes.items() if axis != "ep")
    return run_world(count, layouts.member, kind, sizes, options or {}, changes, expected, overrides)


def check(found, loss=1e-6, gradient=1e-5):
    for each in found:
        assert each.loss < loss
        assert each.entropy < loss
        assert each.error < gradient, each.worst


def test_heads_are_not_cut():
    """Keys and values are told by the heads that they make up, and nothing else can be shared like them."""
    module, plan = torch.nn.Linear(8, 80), SimpleNamespace(style_of=lambda name: "colwise")
    assert [_style("k_proj", module, size, plan, {module: 16}) for size in (5, 2)] == ["colwise", "kv_heads"]
    with pytest.raises(ConfigError, match="80 rows of k_proj are no whole number of heads of 32"):
        _style("k_proj", module, 2, plan, {module: 32})
    with pytest.raises(PluginIncompatibleError, match="tensor_plan: up_proj is 'kv_heads', and is no projection"):
        apply_style(module, "up_proj", "kv_heads", Tensor(mesh=None, rope_dim=8))


def test_gradients_of_two_micro_batches_are_those_of_one_process(subtests):
    for kind, sizes, options, changes in [
        ("llama", HSDP, {}, TIED),
        ("llama", TP, {}, {}),
        ("qwen3", BOTH, {"reshard_after_forward": False, "recompute": "selective"}, {"attention_bias": True}),
        ("apertus", TP, {}, {}),
        ("qwen3_moe", {**BOTH, "ep": 4}, {}, {}),
        ("deepseek_v3", TP, WHOLE_SEQUENCE, TIED),
    ]:
        with subtests.test(kind=kind, sizes=sizes, options=options, changes=changes):
            check(outcomes(kind, sizes, options, changes))


KEPT_WHOLE = {
    "qwen3": [f"self_attn.{name}_proj" for name in "qkvo"],
    "apertus": ["mlp.up_proj", "mlp.down_proj"],
    "deepseek_v3": ["self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"],
}


def test_a_block_that_a_plugin_keeps_whole_is_whole_with_all_that_is_in_it(subtests):
    for kind, options in [("qwen3", {}), ("deepseek_v3", WHOLE_SEQUENCE)]:
        with subtests.test(kind=kind, options=options):
            check_kept_whole(kind, options)


def check_kept_whole(kind, options):
    ends = KEPT_WHOLE[kind]
    found = outcomes(kind, TP, options, overrides=dict.fromkeys(ends, "replicate"))
    check(found)
    shapes = {name: tuple(parameter.shape) for name, parameter in layouts.build(kind).named_parameters()}
    blocks = {end.partition(".")[0] for end in ends}
    kept = [name for name in shapes if any(f".{block}." in name for block in blocks)]
    assert kept
    assert all(found[0].local[name] == shapes[name] for name in kept)


def test_fewer_key_value_heads_than_processes(subtests):
    for options in [{}, WHOLE_SEQUENCE]:
        with subtests.test(options=options):
            found = outcomes("qwen3", {"tp": 4}, options)
            check(found)
            assert found[0].local["model.layers.0.self_attn.k_proj.weight"] == (16, 32)


UNEVEN = {
    "llama": (TP, {}, (34, 33)),
    "qwen3": ({"tp": 4}, WHOLE_SEQUENCE, (17, 17, 17, 16)),
    "opt": (TP, {}, (34, 33)),
    "deepseek_v3": (BOTH, {"recompute": "full"}, (17, 17, 17, 16)),
}


def test_a_vocabulary_that_tp_does_not_divide_is_split_unevenly(subtests):
    for kind, changes in [("llama", {}), ("qwen3", TIED)]:
        with subtests.test(kind=kind, changes=changes):
            check_uneven_vocabulary(kind, changes)


def check_uneven_vocabulary(kind, changes):
    sizes, options, rows = UNEVEN[kind]
    found = outcomes(kind, sizes, options, {"vocab_size": 67, **changes})
    check(found)
    local = [next(shape for name, shape in each.local.items() if "embed_tokens" in name) for each in found]
    assert sorted(shape[0] for shape in local) == sorted(rows)
    assert changes or [each.local["lm_head.weight"] for each in found] == local


def test_each_process_has_its_part():
    local = outcomes("deepseek_v3", {**BOTH, "ep": 4})[0].local
    layer = "model.layers.1"
    assert local["model.embed_tokens.weight"] == local["lm_head.weight"] == (16, 32)
    assert local[f"{layer}.self_attn.q_b_proj.weight"] == (16, 16)
    assert local[f"{layer}.self_attn.o_proj.weight"] == (16, 16)
    assert local[f"{layer}.self_attn.kv_a_proj_with_mqa.weight"] == (12, 32)
    assert local[f"{layer}.mlp.shared_experts.up_proj.weight"] == (4, 32)
    assert local[f"{layer}.mlp.experts.gate_up_proj"] == (2, 32, 32)


def test_bfloat16_keeps_weights_and_gradients_in_float32():
    check(outcomes("qwen3", BOTH, {"micro_batch_precision": "bfloat16"}), loss=1e-3, gradient=0.1)
    assert run_world(2, dtypes) == [({torch.float32}, {torch.float32}, torch.bfloat16)] * 2


def dtypes():
    module = layouts.build("llama")
    mesh = form_mesh(MeshConfig(dp_shard=2), "cpu")
    parallelize(module, Layout(mesh=mesh, micro_batch_precision="bfloat16"), plan_for(module, {}))
    seen = []
    module.model.layers[0].mlp.up_proj.register_forward_hook(lambda *given: seen.append(given[2].dtype))
    layouts.train(module, layouts.tokens())
    return {p.dtype for p in module.parameters()}, {p.grad.dtype for p in module.parameters()}, seen[0]


def test_recomputing_changes_no_bit():
    for kind in ["qwen3", "deepseek_v3"]:
        for recompute in ["full", "selective"]:
            plain, again = layouts.build(kind), layouts.build(kind)
            calls = []
            again.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            parallelize(again, Layout(mesh=single(), recompute=recompute), plan_for(again, {}))
            for module in (plain, again):
                layouts.train(module, layouts.tokens())
            assert len(calls) == 2 * layouts.MICRO_BATCHES
            expected = layouts.gradients(plain)
            for name, gradient in layouts.gradients(again).items():
                assert torch.equal(gradient, expected[name]), name


def test_an_evaluation_frees_weights_so_that_an_update_reaches_the_next():
    assert run_world(2, evaluate_update_evaluate) == [[True, True]] * 2


def evaluate_update_evaluate():
    results = []
    mesh = form_mesh(MeshConfig(dp_shard=2), "cpu")
    for reshard in (True, False):
        module = layouts.build("llama")
        parallelize(module, Layout(mesh=mesh, reshard_after_forward=reshard), plan_for(module, {}))
        with torch.no_grad():
            first, _ = layouts.loss_of(module, layouts.tokens())
            assert all(isinstance(p, DTensor) for p in module.parameters())
            for parameter in module.parameters():
                parameter.mul_(1.5)
            second, _ = layouts.loss_of(module, layouts.tokens())
        results.append(not torch.equal(first, second))
    return results


class Tower(torch.nn.Module):
    """Something beside the decoder that not every forward calls."""

    def __init__(self, inner):
        super().__init__()
        self.visual = torch.nn.Linear(4, 4)
        self.language_model = inner

    def forward(self, **inputs):
        return self.language_model(**inputs)


def test_a_part_that_one_process_does_not_call_gets_the_gradient_of_the_other():
    first, second = run_world(2, train_with_a_tower)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, torch.full((4, 4), 8.0))


def train_with_a_tower():
    mesh = form_mesh(MeshConfig(dp_shard=2), "cpu")
    module = layouts.build("llama")
    module.set_attn_implementation("sdpa")
    module.model = Tower(module.model)
    module.get_decoder = lambda: module.model.language_model
    module.get_input_embeddings = lambda: module.model.language_model.embed_tokens
    parallelize(module, Layout(mesh=mesh), plan_for(module, {}))
    for _ in range(2):

        def body():
            logits = module.lm_head(module.model(input_ids=layouts.tokens(), use_cache=False).last_hidden_state)
            extra = module.model.visual(torch.ones(4, 4)).sum() if mesh.rank == 0 else 0.0
            return logits.sum() + extra

        within(module, body).backward()
    return module.model.visual.weight.grad.full_tensor()


def test_what_does_not_fit_is_refused():
    assert run_world(4, refusals) == [REFUSALS] * 4


REFUSALS = ["heads", "experts", "cpu", "tokens"]


def refusals():
    found = []
    tensor, expert = form_mesh(MeshConfig(tp=4), "cpu"), form_mesh(MeshConfig(dp_shard=4, ep=4), "cpu")
    cases = [
        ("heads", "llama", {"num_attention_heads": 2}, Layout(mesh=tensor), "does not divide the 2 heads"),
        ("experts", "qwen3_moe", {"num_experts": 6}, Layout(mesh=expert), "does not divide the 6 experts"),
        ("cpu", "llama", {}, Layout(mesh=tensor, cpu_offload=True), "CPU memory already"),
        (
            "tokens",
            "llama",
            {"vocab_size": 6},
            Layout(mesh=tensor),
            r"4 processes of an axis leave some without a part of dimension 0 of the embedding.weight, of shape \(6",
        ),
    ]
    for name, kind, changes, layout, message in cases:
        module = layouts.build(kind, **changes)
        with pytest.raises((ConfigError, PluginIncompatibleError), match=message):
            parallelize(module, layout, plan_for(module, {}))
        found.append(name)
    return found


def test_what_a_stage_lacks_another_one_may_have():
    module = layouts.build("llama")
    before = plan_for(module, {})
    module.cosmos_stage = Part(index=0, num_stages=2, layers=range(1), canonical={})
    assert plan_for(module, {"mlp.shared_experts.up_proj": "replicate"}) == before


def test_a_plan_that_cannot_be_followed_is_refused():
    module = layouts.build("llama")
    with pytest.raises(PluginIncompatibleError, match="unknown style 'diagonal'"):
        plan_for(module, {"self_attn.q_proj": "diagonal"})

    module = layouts.build("llama")
    with pytest.raises(PluginIncompatibleError, match=r"called 'lm_head' \(the vocabulary is split always\)"):
        plan_for(module, {"lm_head": "replicate"})
    with pytest.raises(PluginIncompatibleError, match=r"did you mean self_attn\.q_proj\?"):
        plan_for(module, {"self_attn.q_prj": "replicate"})

    overrides = {"self_attn.q_proj": "replicate", "self_attn.o_proj": "replicate"}
    message = r"layers\.\*\.self_attn: k_proj 'colwise', q_proj 'replicate', v_proj 'colwise'"
    with pytest.raises(PluginIncompatibleError, match=message):
        plan_for(layouts.build("llama"), overrides)


def test_plans():
    whole = {f"shared_experts.{name}_proj": "replicate" for name in ("gate", "up", "down")}
    tensor = plan_for(layouts.build("deepseek_v3"), whole).tensor
    assert tensor["model.layers.*.self_attn.kv_a_proj_with_mqa"] == "mla_kv_a_proj"
    assert tensor["model.layers.*.self_attn.q_b_proj"] == "colwise"
    assert "model.layers.*.mlp.experts.down_proj" not in tensor
    assert "model.layers.*.mlp.shared_experts.up_proj" not in tensor
    opt = plan_for(layouts.build("opt"), {}).tensor
    assert opt["model.decoder.layers.*.fc2"] == opt["model.decoder.layers.*.self_attn.out_proj"] == "rowwise"


def test_of_a_foreign_or_unknown_block_the_names_decide():
    module = layouts.build("opt")
    for layer in module.model.decoder.layers:
        layer.self_attn.mixer = torch.nn.Linear(2, 2)
    names = plan_for(module, {}).tensor
    assert {name.rpartition(".")[2] for name in names} == {"fc1", "fc2"}

    module = layouts.build("llama")
    module.tp_plan = {
        **module.tp_plan,
        "model.layers.*.mlp.gate_proj": "colwise_gather_output",
        "model.layers.*.mlp.down_proj": "rowwise_rep",
    }
    names = plan_for(module, {}).tensor
    # By their names they are planned all the same.
    assert names["model.layers.*.mlp.gate_proj"] == "colwise"
    assert names["model.layers.*.mlp.down_proj"] == "rowwise"
