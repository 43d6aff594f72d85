"""Balancing losses and loads on several processes, against one."""

import attrs
import pytest
import torch

from cosmos_core.config.schema import MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.world import World, single_world
from cosmos_core.testing.layouts import PluginModel, make_trainer, train_step, whole, worst_error
from cosmos_core.testing.worlds import run_world
from cosmos_core.types import Payload

LAYOUTS = {
    "dp_shard": {"dp_shard": 2},
    "cp": {"cp": 2},
    "tp": {"tp": 2},
    "ep": {"dp_shard": 2, "ep": 2},
    "pp": {"pp": 2},
}


@attrs.frozen(kw_only=True)
class Weighed:
    """A model whose micro-batches carry the weights of a mean over all decisions."""

    make: PluginModel
    num_decisions: int

    def __call__(self):
        model = self.make()
        inner = model.pack

        def pack(payloads, **arguments):
            batches = inner(payloads, **arguments)
            weight = 1 / self.num_decisions
            return [attrs.evolve(b, weights_N=torch.full((sum(b.num_decisions),), weight)) for b in batches]

        model.pack = pack
        return model


def policy_of(sizes, **parallel):
    return PolicyConfig(
        precision="fp32", micro_batch_units=16, mesh=MeshConfig(**sizes), parallel=ParallelConfig(**parallel)
    )


def step(make, payloads, policy, world):
    model = make()
    trainer = make_trainer(model, policy, world)
    train_step(trainer, payloads, policy)
    gradients = {name: p.grad for name, p in trainer.module.named_parameters() if p.grad is not None}
    tallies = model.tallies(trainer.module)
    for tally in tallies:
        if world.size > 1:
            torch.distributed.all_reduce(tally)
    return whole(gradients, world), [tally.tolist() for tally in tallies]


def steps(make, payloads, policies):
    return [step(make, payloads, policy, World(form_mesh(policy.mesh, "cpu"))) for policy in policies]


@pytest.mark.parametrize("family", ["qwen3-moe"])
def test_gradients_and_loads_do_not_depend_on_the_layout(make, payloads, family):
    options = {"auxiliary_loss": 0.7, "z_loss": 0.2}
    # As many equal micro-batches for each process: none only keeps step.
    payloads = [Payload(kind=p.kind, arrays=p.arrays) for p in payloads[:2] * 2]
    plugin = PluginModel(plugin=family, options=options, context=make(family, {"num_hidden_layers": 4}).context)
    weighed = Weighed(make=plugin, num_decisions=sum(p.arrays["completion"].shape[0] for p in payloads))
    policies = [policy_of(sizes) for sizes in LAYOUTS.values()]
    found = run_world(2, steps, weighed, payloads, policies)[0]
    expected, loads = step(weighed, payloads, policy_of({}), single_world())
    for name, (gradients, tallies) in zip(LAYOUTS, found, strict=True):
        parameter, error = worst_error(gradients, expected)
        assert error < 1e-4, f"{name}: {parameter}"
        if name == "pp":
            continue
        shares = 2 if name == "tp" else 1
        assert tallies == [[value * shares for value in load] for load in loads], name
