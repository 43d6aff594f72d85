"""Compares training steps on several processes, along each axis that a model declares, with one process.

Shape legend: N decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast, get_args

import attrs
import pytest
import torch

from cosmos_core.config.schema import LoraConfig, MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.models.parallel.lora import is_adapter
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import MicroBatch, Model
from cosmos_core.protocols.layout import Axis
from cosmos_core.protocols.model import PipelinedModel
from cosmos_core.testing.conformance.model.subject import Subject, first_difference
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import (
    Stepped,
    step_alone,
    steps_in_layouts,
    worst_error,
)
from cosmos_core.testing.worlds import WorldFailedError

_GRADIENTS: Final[Mapping[torch.dtype, float]] = {torch.float64: 1e-6, torch.float32: 5e-6}
"""Largest difference of a parameter's gradient, relative to its norm."""
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
        """Weights, loss, gradients and counts do not depend on the layout, nor does what a process says of a batch."""
        axes = [axis for axis in get_args(Axis) if axis in _possible(subject)]
        if not axes:
            pytest.skip("not declared: no axis that this model can be spread over")
        missing = [
            name for name in ("stages", "advance", "conclude") if not callable(getattr(subject.model, name, None))
        ]
        if "pp" in axes and missing:
            fault(f"ModelCapabilities.mesh_axes declares pp, and the model has no method {', '.join(missing)}")
        # Experts are spread over processes that another axis makes.
        meshes = [MeshConfig(**{axis: 2, **({"dp_shard": 2} if axis == "ep" else {})}) for axis in axes]
        policies = [_policy(subject, mesh) for mesh in meshes]
        with _failure_of(f"a step with {', '.join(axes)} of 2, one after another,"):
            steps = steps_in_layouts(subject.maker, subject.payloads, policies, processes=2, inspect=_inspect)
        expected = step_alone(subject.maker, subject.payloads, _policy(subject))
        for axis, found in zip(axes, steps, strict=True):
            if name := first_difference(found.weights, expected.weights):
                fault(f"with {axis} = 2 build() makes other weights: {name}; they must not depend on the layout")
            # Of float32; faults are orders of magnitude larger.
            _compare(f"with {axis} = 2", found, expected, loss=1e-5, gradient=1e-4)


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
        for dtype, some in ((torch.float64, policies), (torch.float32, policies[:1])):
            alone = {lora: _alone(subject, dtype, lora) for lora in {policy.lora for policy in some}}
            with _failure_of("a step on 4 processes"):
                steps = steps_in_layouts(
                    subject.maker, subject.payloads, some, processes=4, dtypes=[dtype], timeout_s=200.0
                )
            for policy, stepped in zip(some, steps, strict=True):
                sizes = [f"{axis} = {size}" for axis, size in sorted(_sizes(policy.mesh).items())]
                where = f"with {', '.join([*sizes, *(['adapters'] if policy.lora is not None else [])])} in {dtype}"
                trained = [] if policy.lora is None else [name for name in stepped.gradients if not is_adapter(name)]
                if trained:
                    fault(f"{where} {trained[0]} has a gradient, and is no adapter; freeze what adapters are beside")
                _compare(where, stepped, alone[policy.lora], loss=1e-6, gradient=_GRADIENTS[dtype])


@contextmanager
def _failure_of(what: str) -> Iterator[None]:
    try:
        yield
    except WorldFailedError as error:
        fault(f"{what} failed:\n{error}")


def _inspect(model: Model, module: torch.nn.Module, batches: Sequence[MicroBatch], world: World) -> None:
    """Look at a module on every process of a world, all of which have these micro-batches."""
    if world.mesh.size("pp") > 1:
        pipelined = cast("PipelinedModel", model)
        stages = pipelined.stages(module)
        if not stages:
            fault(f"stages() gave none on rank {world.rank}")
        if world.mesh.place("pp") == 0 and pipelined.advance(stages[0], batches[0], None)._is_view():  # noqa: SLF001
            fault("advance() gave a view: what is passed on is detached in place; give a clone")
        return
    for batch in batches:
        with torch.no_grad():
            logprobs_N = model.decide(module, batch, temperature=1.0).logprobs_N
        if tuple(logprobs_N.shape) != (total := sum(batch.num_decisions),):
            fault(
                f"decide() gave log-probs {tuple(logprobs_N.shape)} for {total} decisions on rank {world.rank}; "
                "every process that shares the sequences returns all of their decisions"
            )
        for rank, data in enumerate(world.exchange(logprobs_N.numpy().tobytes())):
            other_N = torch.frombuffer(bytearray(data), dtype=logprobs_N.dtype)
            if not torch.allclose(other_N, logprobs_N, rtol=1e-4, atol=1e-4):
                error = float((other_N - logprobs_N).abs().max())
                fault(f"decide() gives other log-probs on rank {rank} than on {world.rank}, by {error:.3g}")


def _compare(where: str, found: Stepped, expected: Stepped, *, loss: float, gradient: float) -> None:
    _compare_numbers(where, "loss", found.loss, expected.loss, loss)
    name, error = worst_error(found.gradients, expected.gradients)
    if not error <= gradient:
        both = found.gradients, expected.gradients
        norms = " and ".join(f"{float(side[name].norm()):.6g}" if name in side else "none" for side in both)
        fault(
            f"{where} the gradient of {name} differs from one process's by {error:.3g} of its norm (norms {norms}); "
            "is it summed over processes exactly once?"
        )
    _compare_numbers(where, "norm of the gradient", found.norm, expected.norm, gradient)
    for name in found.metrics.keys() | expected.metrics.keys():
        one, other = (each.metrics.get(name, math.nan) for each in (found, expected))
        _compare_numbers(where, f"{name} of after_step()", one, other, gradient)


def _compare_numbers(where: str, what: str, one: float, other: float, allowed: float) -> None:
    if not abs(one - other) <= allowed * abs(other):
        fault(f"{where} the {what} is {one:.9g}, in one process {other:.9g}")


def _possible(subject: Subject) -> frozenset[Axis]:
    """The declared axes but for those of which planning refuses any recipe."""
    return subject.capabilities.mesh_axes - subject.facts.impossible.keys()


def _policy(subject: Subject, mesh: MeshConfig | None = None, **others: Any) -> PolicyConfig:
    # Two micro-batches at least: what is reduced twice shows at the second one only.
    budget = max(batch.num_units for batch in subject.alone)
    return PolicyConfig(precision="fp32", micro_batch_units=budget, mesh=mesh or MeshConfig(), **others)


def _alone(subject: Subject, dtype: torch.dtype, lora: LoraConfig | None) -> Stepped:
    try:
        return step_alone(subject.maker, subject.payloads, _policy(subject, lora=lora), dtype=dtype)
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        fault(f"the model does not compute in {dtype} ({type(error).__name__}: {error}); build() must take it")


def _sizes(mesh: MeshConfig) -> dict[str, int]:
    return {axis: size for axis, size in attrs.asdict(mesh).items() if size > 1}
