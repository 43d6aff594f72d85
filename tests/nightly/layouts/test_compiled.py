"""Compiled layers in one process: graphs are really made, whatever is recomputed, and the step stays the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.utils import counters  # what torch itself counts graphs with

from cosmos_core.config.schema import Float8Config, ParallelConfig, PolicyConfig
from cosmos_core.policy.processes.world import single_world
from cosmos_core.testing.layouts import make_trainer, train_step, worst_error
from tests.families import CONFIGS, family, text_payloads

# torch's compiler looks at what it then finds not to be there.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def graphs(monkeypatch):
    """Captured as for an accelerator, and run as they are: kernels take a C++ compiler, and their time."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
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


def test_rows_of_other_lengths_need_no_new_graphs(graphs):
    policy = PolicyConfig(precision="fp32", micro_batch_units=256, parallel=ParallelConfig(compile="on"))
    trainer = make_trainer(family("hf", {**CONFIGS["qwen3"], "num_hidden_layers": 1})(), policy, single_world())
    made = []
    for seed in range(3):
        train_step(trainer, text_payloads(seed=seed))
        made.append(graphs["stats"]["unique_graphs"])
    assert made[1:] == [made[1]] * 2
