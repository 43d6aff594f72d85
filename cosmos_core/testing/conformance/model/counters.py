"""What a model counts in a step, and what it does with the counts (`AfterStep`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import pytest
import torch

from cosmos_core.protocols import AfterStep, Model
from cosmos_core.testing.conformance.model.evaluation import ROOM
from cosmos_core.testing.conformance.model.setting import ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload


class ModelCounters(ModelSetting):
    """`counters` and `after_step` of a model that has them; their sums over processes are tested with the layouts."""

    @pytest.fixture
    def counting(self, model: Model, module: torch.nn.Module) -> AfterStep:
        """The model, as one that counts."""
        if not isinstance(model, AfterStep) or not model.counters(module):
            pytest.skip("not declared: with these options the model counts nothing (`AfterStep`)")
        return model

    def test_only_forwards_of_a_step_are_counted_from_zero(
        self, model: Model, counting: AfterStep, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """The trainer zeroes the tensors and writes the sums over all processes into them."""
        if odd := [counter.dtype for counter in counting.counters(module) if counter.dtype != torch.float32]:
            fault(f"counters() gave {odd[0]}; give float32, in which they are summed over processes")
        seen = []
        for is_learned in (True, True, False):
            for counter in counting.counters(module):
                counter.zero_()
            _total(model, module, payloads, is_learned=is_learned)
            seen.append([counter.clone() for counter in counting.counters(module)])
        first, again, unlearned = seen
        if any(not torch.equal(one, other) for one, other in zip(first, again, strict=True)):
            fault("the same forwards count something else after counters() were zeroed; give the tensors, never copies")
        if any(bool(counter.any()) for counter in unlearned):
            fault("a forward without weights_N is counted: nothing is learned from it")

    def test_acting_on_counts_leaves_trained_parameters_alone(
        self, model: Model, counting: AfterStep, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """The optimizer has moved them already, and keeps a state for each."""
        _total(model, module, payloads, is_learned=True).backward()  # type: ignore[no-untyped-call]
        before = {
            name: parameter.detach().clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        metrics = counting.after_step(module)
        if odd := [name for name, value in metrics.items() if not math.isfinite(value)]:
            fault(f"after_step() reports {odd[0]} = {metrics[odd[0]]}; give finite numbers")
        after = dict(module.named_parameters())
        if moved := [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]:
            fault(f"after_step() changed {moved[0]}, which has a gradient; leave it to the optimizer")


def _total(model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, is_learned: bool) -> torch.Tensor:
    """The log-probability of all payloads, evaluated as in a step or outside of one."""
    total = torch.zeros(())
    for batch in model.pack(payloads, budget=ROOM):
        weights_N = torch.ones(sum(batch.num_decisions)) if is_learned else None
        decided = model.decide(module, attrs.evolve(batch, weights_N=weights_N), temperature=1.0)
        total = total + decided.logprobs_N.sum()
    return total
