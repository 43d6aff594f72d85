"""Compiled layers: graphs are really made, whatever is recomputed, no more than needed, and the step stays the same.

How many are made is counted in one process of a fake group, whose collectives answer at once.
"""

from __future__ import annotations

import attrs
import pytest
import torch
from torch._dynamo.utils import counters  # what torch itself counts graphs with

from cosmos_core.config.schema import Float8Config, MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models import huggingface
from cosmos_core.models.parallel import compiled, offload
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.testing.layouts import make_trainer, step_alone, steps_in_layouts, train_step, worst_error
from tests.families import CONFIGS, family, text_payloads
from tests.places import fake_mesh
from tests.streams import delay_offloading

# torch's compiler looks at what it then finds not to be there.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def graphs(monkeypatch):
    """Captured as for an accelerator, and run as they are: kernels take a C++ compiler, and their time."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        torch._dynamo.reset()
        counters.clear()
        yield counters
        torch._dynamo.reset()


def stepped(name, compiled, recompute, scaling):
    policy = PolicyConfig(
        precision="fp32",
        micro_batch_units=256,
        parallel=ParallelConfig(compile=compiled, recompute=recompute),
        float8=Float8Config(scaling=scaling),
    )
    trainer = make_trainer(family("hf", {**CONFIGS[name], "num_hidden_layers": 1})(), policy, single_world())
    meter = train_step(trainer, text_payloads(number=4))
    return meter.sums["loss"], {key: each.grad for key, each in trainer.module.named_parameters()}


@pytest.mark.parametrize(
    ("name", "recompute", "scaling"),
    [
        ("qwen3", "selective", "none"),
        ("qwen3", "full", "rowwise"),
        ("qwen3", "none", "tensorwise"),
        ("qwen3-moe", "none", "none"),
    ],
)
def test_a_compiled_step_is_that_of_eager_layers(graphs, name, recompute, scaling):
    loss, gradients = stepped(name, "off", recompute, scaling)
    assert graphs["stats"]["unique_graphs"] == 0
    found = stepped(name, "on", recompute, scaling)
    assert graphs["stats"]["unique_graphs"] > 0
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert worst_error(found[1], gradients)[1] < 1e-4


@pytest.fixture
def made(graphs, monkeypatch):
    """Gives the number of graphs after each of four steps, whose rows have other lengths."""
    monkeypatch.setattr(huggingface, "check_tiny_model", lambda *_: None)

    def made(name, recompute, num_layers, **axes):
        parallel, sizes = ParallelConfig(compile="on", recompute=recompute), MeshConfig(**axes)
        policy = PolicyConfig(precision="fp32", micro_batch_units=256, mesh=sizes, parallel=parallel)
        torch._dynamo.reset()
        graphs.clear()
        with fake_mesh(sizes) as mesh:
            config = {**CONFIGS[name], "num_hidden_layers": num_layers}
            trainer = make_trainer(family("hf", config)(), policy, World(mesh))
            found = []
            for seed in range(4):
                train_step(trainer, text_payloads(seed=seed, number=4 + 2 * seed))
                found.append(graphs["stats"]["unique_graphs"])
        assert all("disable" in reason for reason in graphs["graph_break"]), list(graphs["graph_break"])
        assert graphs["frames"]["ok"] == graphs["frames"]["total"]
        assert not graphs["unimplemented"]
        return found

    return made


@pytest.mark.parametrize(
    ("name", "recompute", "axes"),
    [
        ("qwen3", "full", {"dp_shard": 2}),
        ("qwen3", "selective", {"tp": 2}),
        ("qwen3-moe", "full", {"tp": 2, "dp_shard": 2, "ep": 4}),
        ("deepseek-v3", "none", {"tp": 2}),
    ],
)
def test_graphs_grow_with_neither_layers_nor_lengths(made, name, recompute, axes):
    few, many = (made(name, recompute, num_layers, **axes) for num_layers in (3, 13))
    assert many == few, "each layer makes graphs of its own"
    assert few[1:] == [few[1]] * 3, "each length of rows makes graphs of its own"
    assert 0 < few[0] < few[1] <= 2 * few[0]


def test_more_graphs_than_there_can_be_are_refused(made, monkeypatch):
    monkeypatch.setattr(compiled, "_MOST_GRAPHS", 1)
    torch._dynamo.config.recompile_limit = 1
    with pytest.raises(
        PluginIncompatibleError, match=r"compile: Qwen3DecoderLayer .* the recompile_limit .* set to 1.* 'off'"
    ):
        made("qwen3", "none", 2)


@pytest.fixture
def partitioned(graphs, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager_decomp_partition")
    return graphs


def test_what_is_recomputed_in_part_is_kept_in_part(partitioned):
    def kept(recompute):
        parallel = ParallelConfig(compile="on", recompute=recompute)
        policy = PolicyConfig(precision="fp32", micro_batch_units=256, parallel=parallel)
        trainer = make_trainer(family("hf", {**CONFIGS["qwen3"], "num_hidden_layers": 1})(), policy, single_world())
        own = {parameter.data_ptr() for parameter in trainer.module.parameters()}
        found = {}

        def keep(tensor):
            # They are held, so that no address comes again.
            found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            train_step(trainer, text_payloads(number=4))
        kept = [tensor for place, tensor in found.items() if place not in own]
        width = CONFIGS["qwen3"]["intermediate_size"]
        return sum(each.untyped_storage().nbytes() for each in kept), sum(each.shape[-1] == width for each in kept)

    (none, gated), (selective, products), (full, _) = map(kept, ("none", "selective", "full"))
    assert full < selective < 0.9 * none
    # Of the feed-forward layer two products, but not what is made of them.
    assert (gated, products) == (3, 2)


def test_casts_of_weights_within_a_graph_are_not_offloaded(partitioned, monkeypatch):
    copied = []
    copy = offload._copy
    monkeypatch.setattr(offload, "_copy", lambda *pair: (copied.append(sum(map(len, pair[0]))), copy(*pair))[1])
    parallel = ParallelConfig(compile="on", offload_activations=True)
    policy = PolicyConfig(precision="bf16", micro_batch_units=256, parallel=parallel)
    trainer = make_trainer(family("hf", {**CONFIGS["qwen3"], "num_hidden_layers": 1})(), policy, single_world())
    casts = {2 * each.numel() for each in trainer.module.model.layers.parameters() if each.dim() == 2}
    train_step(trainer, text_payloads(number=4))
    assert copied
    assert not casts & set(copied)


@attrs.frozen
class Partitioned:
    """Makes a model in a process whose graphs take no C++ compiler."""

    name: str

    def __call__(self):
        compiled.BACKEND = "aot_eager_decomp_partition"
        delay_offloading()
        return family("hf", CONFIGS[self.name])()


@pytest.mark.parametrize(
    ("name", "meshes", "ragged"),
    [
        ("qwen3", [{"tp": 2}, {"dp_shard": 2}], {"none", "selective", "full"}),
        # Graphs of rows of any length take most of the time: made once of three times.
        ("qwen3-moe", [{"tp": 2, "ep": 2}], {"selective"}),
    ],
)
def test_a_compiled_step_of_two_processes_is_that_of_one(name, meshes, ragged):
    def policy(recompute, **mesh):
        parallel = ParallelConfig(compile="on", recompute=recompute, offload_activations=recompute != "selective")
        units = 64 if recompute in ragged else 512
        return PolicyConfig(precision="fp32", micro_batch_units=units, mesh=MeshConfig(**mesh), parallel=parallel)

    layouts = [policy(recompute, **mesh) for mesh in meshes for recompute in ("none", "selective", "full")]
    plain = PolicyConfig(precision="fp32", micro_batch_units=64)
    expected = step_alone(family("hf", CONFIGS[name]), text_payloads(), plain)
    for found in steps_in_layouts(Partitioned(name), text_payloads(), layouts, processes=2):
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert worst_error(found.gradients, expected.gradients)[1] < 1e-5
