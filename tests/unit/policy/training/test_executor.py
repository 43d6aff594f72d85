from __future__ import annotations

import attrs
import pytest
import torch

from cosmos_core.models.parallel.forwards import root
from cosmos_core.policy.mesh.mesh import single
from cosmos_core.policy.mesh.pipeline import Forward, Pipeline
from cosmos_core.policy.training.executor import Sequential, make_executor, watch_layers
from cosmos_core.protocols import Decided, Layout, MicroBatch
from cosmos_core.replica.activity import Activity


class Line:
    """A model of one decision for each unit, whose log-prob is the only weight times the unit's number."""

    def decide(self, module, batch, *, temperature, with_entropy=False):
        units_N = torch.arange(1.0, batch.num_units + 1)
        logprobs_N = module.weight[0, 0] * units_N / temperature
        return Decided(logprobs_N=logprobs_N, entropy_N=units_N if with_entropy else None)


def make_batches(*sizes):
    return [MicroBatch(sequences=(), num_decisions=(), num_units=size, inputs={}) for size in sizes]


@pytest.fixture
def module():
    module = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(3.0)
    return module


def test_one_process_evaluates_in_order_without_gradients(module):
    executor = make_executor(Line(), module, single(), "1f1b")
    assert isinstance(executor, Sequential)
    decided = executor.evaluate(make_batches(2, 1), Forward(temperature=2.0, with_entropy=True))
    assert [each.logprobs_N.tolist() for each in decided] == [[1.5, 3.0], [1.5]]
    assert [each.entropy_N.tolist() for each in decided] == [[1.0, 2.0], [1.0]]
    assert not any(each.logprobs_N.requires_grad for each in decided)
    assert executor.evaluate(make_batches(1), Forward(temperature=1.0))[0].entropy_N is None


def test_what_is_kept_of_a_micro_batch_is_made_before_the_next_is_evaluated(module):
    order = []

    class Told(Line):
        def decide(self, module, batch, **asked):
            order.append(batch.num_units)
            return super().decide(module, batch, **asked)

    def judge(decided):
        order.append("judged")
        return attrs.evolve(decided, entropy_N=None)

    executor = make_executor(Told(), module, single(), "1f1b")
    decided = executor.evaluate(make_batches(2, 1), Forward(temperature=1.0, with_entropy=True), judge=judge)
    assert order == [2, "judged", 1, "judged"]
    assert [each.entropy_N for each in decided] == [None, None]
    assert executor.concludes


def test_gradients_are_added_to_those_there_are(module):
    module.weight.grad = held = torch.full_like(module.weight, 5.0)
    seen = []

    def loss(index, decided):
        seen.append((index, decided.entropy_N is None))
        return decided.logprobs_N.sum() * (index + 1)

    executor = make_executor(Line(), module, single(), "1f1b")
    executor.train(make_batches(2, 1), Forward(temperature=1.0, with_entropy=False), loss=loss)
    assert seen == [(0, True), (1, True)]
    # d/dw: 1 + 2 units of the first, 2 · 1 of the second.
    assert module.weight.grad is held
    assert held.item() == 5.0 + 3.0 + 2.0


class PipeMesh:
    def size(self, axis):
        return 2


class Staged(Line):
    def stages(self, module):
        return [module]


KEEPS = {"reshard_after_forward": False}


def check_a_pipeline_is_run_by_its_own_executor(module, monkeypatch, options, splits_backward, keeps_gradients):
    made = []
    monkeypatch.setattr(Pipeline, "__init__", lambda self, *args, **named: made.append((args[3], named)))
    if options is not None:
        root(module, Layout(mesh=PipeMesh(), **options))
    assert isinstance(make_executor(Staged(), module, PipeMesh(), "zero-bubble"), Pipeline)
    assert made == [("zero-bubble", {"splits_backward": splits_backward, "keeps_gradients": keeps_gradients})]


def test_a_pipeline_is_run_by_its_own_executor(module, monkeypatch):
    for options, splits_backward, keeps_gradients in [
        (None, True, True),
        (KEEPS, True, True),
        ({**KEEPS, "recompute": "selective"}, False, True),
        ({**KEEPS, "compile": True}, False, True),
        ({"reshard_after_forward": True}, False, False),
    ]:
        check_a_pipeline_is_run_by_its_own_executor(module, monkeypatch, options, splits_backward, keeps_gradients)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Module()
        self.base.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        for layer in self.base.layers:
            x = layer(x)
        return x


def test_each_layer_is_progress_whoever_calls_it():
    model, activity = Model(), Activity()
    watch_layers(model, activity)
    model(torch.zeros(1, 2))
    assert activity.pulse().progress == 4
    model.base.layers[1](torch.zeros(1, 2))
    assert activity.pulse().progress == 5
