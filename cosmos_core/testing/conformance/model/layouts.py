"""Every axis that a model declares, against one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, get_args

import pytest
import torch

from cosmos_core.config.schema import MeshConfig, PolicyConfig
from cosmos_core.protocols import Axis, Model, ModelCapabilities, ModelContext
from cosmos_core.testing.conformance.model.evaluation import first_difference, pack_alone
from cosmos_core.testing.conformance.model.inspection import inspect
from cosmos_core.testing.conformance.model.setting import ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import PluginModel, Stepped, step_alone, steps_in_layouts, worst_error
from cosmos_core.testing.worlds import WorldFailedError
from cosmos_core.types import JSON, Payload

PROCESSES: Final = 2
_PIPELINED: Final = ("stages", "advance", "conclude")
LOSS: Final = 1e-5
GRADIENT: Final = 1e-4
"""Largest relative differences in float32; faults are orders of magnitude larger."""


class ModelLayouts(ModelSetting):
    """A training step on two processes along each axis, in float32."""

    def test_declared_mesh_axes_equal_one_process(
        self,
        capabilities: ModelCapabilities,
        options: Mapping[str, JSON],
        context: ModelContext,
        model: Model,
        payloads: Sequence[Payload],
    ) -> None:
        """Weights, loss, gradients and counts do not depend on the layout, nor does what a process says of a batch."""
        # Planning refuses the impossible ones.
        possible = capabilities.mesh_axes - model.facts().impossible.keys()
        axes = [axis for axis in get_args(Axis) if axis in possible]
        if not axes:
            pytest.skip("not declared: no axis that this model can be spread over")
        if "pp" in axes and (missing := [name for name in _PIPELINED if not callable(getattr(model, name, None))]):
            fault(f"ModelCapabilities.mesh_axes declares pp, and the model has no method {', '.join(missing)}")
        make = PluginModel(plugin=self.plugin, options=options, context=context)
        # Two micro-batches at least: what is reduced twice shows at the second one only.
        budget = max(pack_alone(model, payload).num_units for payload in payloads)
        policies = [_policy(axis, budget) for axis in axes]
        try:
            found = steps_in_layouts(make, payloads, policies, processes=PROCESSES, inspect=inspect)
        except WorldFailedError as error:
            fault(f"a step with {', '.join(axes)} of {PROCESSES}, one after another, failed:\n{error}")
        expected = step_alone(make, payloads, PolicyConfig(precision="fp32", micro_batch_units=budget))
        for axis, stepped in zip(axes, found, strict=True):
            _compare(axis, stepped, expected)


def _policy(axis: Axis, budget: int) -> PolicyConfig:
    # Experts are spread over processes that another axis makes.
    sizes = {axis: PROCESSES} | ({"dp_shard": PROCESSES} if axis == "ep" else {})
    return PolicyConfig(precision="fp32", micro_batch_units=budget, mesh=MeshConfig(**sizes))


def _compare(axis: Axis, found: Stepped, expected: Stepped) -> None:
    if name := first_difference(found.weights, expected.weights):
        fault(f"with {axis} = {PROCESSES} build() makes other weights: {name}; they must not depend on the layout")
    _compare_numbers(axis, {"loss": (found.loss, expected.loss, LOSS)})
    _compare_gradients(axis, found, expected)
    numbers = {"norm of the gradient": (found.norm, expected.norm, GRADIENT)}
    for name in found.metrics.keys() | expected.metrics.keys():
        values = (found.metrics.get(name, math.nan), expected.metrics.get(name, math.nan))
        numbers[f"{name} of after_step()"] = (*values, GRADIENT)
    _compare_numbers(axis, numbers)


def _compare_numbers(axis: Axis, numbers: Mapping[str, tuple[float, float, float]]) -> None:
    for what, (one, other, allowed) in numbers.items():
        if not abs(one - other) <= allowed * abs(other):
            fault(f"with {axis} = {PROCESSES} the {what} is {one:.9g}, in one process {other:.9g}")


def _compare_gradients(axis: Axis, found: Stepped, expected: Stepped) -> None:
    name, error = worst_error(found.gradients, expected.gradients)
    if not error <= GRADIENT:
        norms = [
            float(side[name].norm()) if name in side else torch.nan for side in (found.gradients, expected.gradients)
        ]
        fault(
            f"with {axis} = {PROCESSES} the gradient of {name} differs from one process's by {error:.3g} of its norm "
            f"(norms {norms[0]:.6g} and {norms[1]:.6g}); is it summed over processes exactly once?"
        )
