"""Compares training steps on several processes, along each axis that a model declares, with one process.

Shape legend: N decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import attrs
import pytest
import torch

from cosmos_core.config.schema import LoraConfig, MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.models.parallel.lora import is_adapter
from cosmos_core.protocols.layout import Axis
from cosmos_core.testing.conformance.model.subject import Subject, first_difference
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import step_alone, steps_in_layouts, worst_error

_LAYOUTS: Final[Sequence[tuple[MeshConfig, Mapping[str, Any]]]] = (
    (MeshConfig(dp_shard=4), {}),
    (MeshConfig(dp_replicate=2, dp_shard=2), {"parallel": ParallelConfig(recompute="selective")}),
    (MeshConfig(dp_shard=2, cp=2), {}),
    (MeshConfig(dp_replicate=2, cp=2), {"parallel": ParallelConfig(recompute="full")}),
    (MeshConfig(dp_shard=2, cp=2), {"lora": LoraConfig(rank=2, alpha=4.0)}),
)


class LayoutTests:
    """A training step on two processes along each declared axis, in float32."""

    def test_declared_mesh_axes_equal_one_process(self, subject: Subject) -> None:
        """Weights, loss, gradients and counts do not depend on the layout."""
        axes = [axis for axis in get_args(Axis) if axis in _possible(subject)]
        if not axes:
            pytest.skip("not declared: no axis that this model can be spread over")
        # Experts are spread over processes that another axis makes.
        meshes = [MeshConfig(**{axis: 2, **({"dp_shard": 2} if axis == "ep" else {})}) for axis in axes]
        # Of float32; faults are orders of magnitude larger.
        layouts = [(_policy(subject, mesh), torch.float32) for mesh in meshes]
        _check_steps(subject, layouts, 2, loss=1e-5, gradients={torch.float32: 1e-4})


class ModelSpreading:
    """Training steps on four processes, along several axes, compared as closely as floats allow."""

    def test_axes_together_equal_one_process(self, subject: Subject) -> None:
        """Sums over processes are those of one process: to 1e-6 in float64, in float32 but for its rounding.

        In float32 a gradient that is what is left of larger terms, such as that of the bias of keys, is rounded to some
        1e-6 of its norm in any layout. In float64 what is left are parts that a transformer computes in float32.
        """
        possible = _possible(subject)
        policies = [_policy(subject, mesh, **others) for mesh, others in _LAYOUTS if set(_sizes(mesh)) <= possible]
        if not policies:
            pytest.skip("not declared: neither dp_shard nor two axes that this model can be spread over")
        # In float64 all of them; float32 is the same arithmetic, rounded, so one of them tells.
        layouts = [*((policy, torch.float64) for policy in policies), (policies[0], torch.float32)]
        _check_steps(subject, layouts, 4, loss=1e-6, gradients={torch.float64: 1e-6, torch.float32: 5e-6})


def _check_steps(
    subject: Subject,
    layouts: Sequence[tuple[PolicyConfig, torch.dtype]],
    processes: int,
    *,
    loss: float,
    gradients: Mapping[torch.dtype, float],
) -> None:
    """Compare a step in each layout with that of one process, relative to their size: the loss and each gradient."""
    names = [_name(policy) for policy, _ in layouts]
    policies, dtypes = [policy for policy, _ in layouts], [dtype for _, dtype in layouts]
    try:
        alone = {
            (lora, dtype): step_alone(subject.maker, subject.payloads, _policy(subject, lora=lora), dtype=dtype)
            for lora, dtype in {(policy.lora, dtype) for policy, dtype in layouts}
        }
        steps = steps_in_layouts(subject.maker, subject.payloads, policies, processes=processes, dtypes=dtypes)
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        fault(f"a step alone, or on {processes} processes {', '.join(names)}, failed:\n{error}")
    for where, policy, dtype, found in zip(names, policies, dtypes, steps, strict=True):
        expected, gradient = alone[policy.lora, dtype], gradients[dtype]
        if name := first_difference(found.weights, expected.weights):
            fault(f"{where} build() makes other weights: {name}; they must not depend on the layout")
        trained = [] if policy.lora is None else [name for name in found.gradients if not is_adapter(name)]
        if trained:
            fault(f"{where} {trained[0]} has a gradient, and is no adapter; freeze what adapters are beside")
        for what in ("loss", *(found.metrics.keys() | expected.metrics.keys())):
            one, other = ({"loss": each.loss, **each.metrics}.get(what, math.nan) for each in (found, expected))
            if not abs(one - other) <= (loss if what == "loss" else gradient) * abs(other):
                fault(f"{where} in {dtype} the {what} is {one:.9g}, in one process {other:.9g}")
        name, apart = worst_error(found.gradients, expected.gradients)
        if not apart <= gradient:
            what = f"{where} in {dtype} the gradient of {name} differs from one process's by {apart:.3g} of its norm"
            fault(f"{what}; is it summed over processes exactly once?")


def _possible(subject: Subject) -> frozenset[Axis]:
    """The declared axes but for those of which planning refuses any recipe."""
    return subject.capabilities.mesh_axes - subject.facts.impossible.keys()


def _policy(subject: Subject, mesh: MeshConfig | None = None, **others: Any) -> PolicyConfig:
    # Two micro-batches at least: what is reduced twice shows at the second one only.
    budget = max(batch.num_units for batch in subject.alone)
    return PolicyConfig(precision="fp32", micro_batch_units=budget, mesh=mesh or MeshConfig(), **others)


def _name(policy: PolicyConfig) -> str:
    sizes = [f"{axis} = {size}" for axis, size in sorted(_sizes(policy.mesh).items())]
    return f"with {', '.join(sizes)}{'' if policy.lora is None else ', adapters'}"


def _sizes(mesh: MeshConfig) -> dict[str, int]:
    return {axis: size for axis, size in attrs.asdict(mesh).items() if size > 1}
