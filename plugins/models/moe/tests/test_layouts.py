"""Balancing losses and loads on several processes, against one."""

import pytest

from cosmos_core.config.schema import MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.testing.layouts import PluginModel, make_trainer, train_step, whole, worst_error
from cosmos_core.testing.worlds import run_world

pytestmark = pytest.mark.nightly

LAYOUTS = {
    "dp_shard": {"dp_shard": 2},
    "cp": {"cp": 2},
    "tp": {"tp": 2},
    "ep": {"dp_shard": 2, "ep": 2},
    "pp": {"pp": 2},
}


def policy_of(sizes, units=16, **parallel):
    return PolicyConfig(
        precision="fp32", micro_batch_units=units, mesh=MeshConfig(**sizes), parallel=ParallelConfig(**parallel)
    )


def step(make, payloads, policy, world):
    model = make()
    trainer = make_trainer(model, policy, world)
    train_step(trainer, payloads)
    gradients = {name: p.grad for name, p in trainer.module.named_parameters() if p.grad is not None}
    return whole(gradients, world), [counter.tolist() for counter in model.counters(trainer.module)]


def steps(make, payloads, policies):
    return [step(make, payloads, policy, World(form_mesh(policy.mesh, "cpu"))) for policy in policies]


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek"])
def test_gradients_and_loads_do_not_depend_on_the_layout(make, payloads, family):
    options = {"auxiliary_loss": 0.7, "z_loss": 0.2}
    plugin = PluginModel(plugin=family, options=options, context=make(family, {"num_hidden_layers": 4}).context)
    policies = [policy_of(sizes) for sizes in LAYOUTS.values()]
    found = run_world(2, steps, plugin, payloads, policies)[0]
    expected, loads = step(plugin, payloads, policy_of({}), single_world())
    for name, (gradients, counters) in zip(LAYOUTS, found, strict=True):
        parameter, error = worst_error(gradients, expected)
        assert error < 1e-4, f"{name}: {parameter}"
        # A stage of a pipeline has the counts of its own layers.
        assert counters == loads[: len(counters)], name


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_pipeline_learns_nothing_from_micro_batches_that_fill_its_schedule(make, payloads, schedule):
    options = {"auxiliary_loss": 0.7, "z_loss": 0.2}
    plugin = PluginModel(
        plugin="qwen3-moe", options=options, context=make("qwen3-moe", {"num_hidden_layers": 4}).context
    )
    (gradients, counters), *_ = run_world(2, steps, plugin, payloads, [policy_of({"pp": 2}, 500, schedule=schedule)])[0]
    expected, loads = step(plugin, payloads, policy_of({}, 500), single_world())
    parameter, error = worst_error(gradients, expected)
    assert error < 1e-4, parameter
    # In no particular order, where a process has stages that do not follow one another.
    assert all(counter in loads for counter in counters)
