"""Compares training steps on several processes, along each axis that a model declares, with one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, get_args

import attrs
import pytest
import torch

from cosmos_core.config.schema import LoraConfig, MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.errors import CosmosError
from cosmos_core.models.adapters import is_adapter
from cosmos_core.policy.mesh.layout import undeclared
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.microbatch import pieces
from cosmos_core.protocols import MicroBatch, Model, ModelCapabilities
from cosmos_core.protocols.layout import Axis
from cosmos_core.protocols.model import PipelinedModel
from cosmos_core.testing.conformance.model.subject import SEED, Subject, first_difference
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import (
    MakeModel,
    Stepped,
    build_part,
    packed,
    step_alone,
    steps_in_layouts,
    whole,
    worst_error,
)
from cosmos_core.testing.worlds import WorldFailedError, run_world
from cosmos_core.types import Payload

_PAIR: Final = 2
_PIPELINED: Final = ("stages", "advance", "conclude")
_PAIR_LOSS: Final = 1e-5
_PAIR_GRADIENT: Final = 1e-4
"""Largest relative differences in float32; faults are orders of magnitude larger."""
_SAID: Final = 1e-4
"""Largest difference of a log-prob between processes."""


class LayoutTests:
    """A training step on two processes along each declared axis, in float32, and axes that are not declared."""

    def test_declared_mesh_axes_equal_one_process(self, subject: Subject) -> None:
        """Weights, loss, gradients and counts do not depend on the layout, nor does what a process says of a batch."""
        axes = [axis for axis in get_args(Axis) if axis in _possible(subject)]
        if not axes:
            pytest.skip("not declared: no axis that this model can be spread over")
        missing = [name for name in _PIPELINED if not callable(getattr(subject.model, name, None))]
        if "pp" in axes and missing:
            fault(f"ModelCapabilities.mesh_axes declares pp, and the model has no method {', '.join(missing)}")
        # Experts are spread over processes that another axis makes.
        sizes: list[dict[str, int]] = [{axis: _PAIR, **({"dp_shard": _PAIR} if axis == "ep" else {})} for axis in axes]
        policies = [_policy(subject, MeshConfig(**each)) for each in sizes]
        try:
            found = steps_in_layouts(subject.maker, subject.payloads, policies, processes=_PAIR, inspect=inspect)
        except WorldFailedError as error:
            fault(f"a step with {', '.join(axes)} of {_PAIR}, one after another, failed:\n{error}")
        expected = step_alone(subject.maker, subject.payloads, _policy(subject))
        for axis, stepped in zip(axes, found, strict=True):
            where = f"with {axis} = {_PAIR}"
            if name := first_difference(stepped.weights, expected.weights):
                fault(f"{where} build() makes other weights: {name}; they must not depend on the layout")
            _compare(where, stepped, expected, loss=_PAIR_LOSS, gradient=_PAIR_GRADIENT)
            _compare_numbers(where, {"norm of the gradient": (stepped.norm, expected.norm)}, _PAIR_GRADIENT)
            counted = {
                f"{name} of after_step()": (stepped.metrics.get(name, math.nan), expected.metrics.get(name, math.nan))
                for name in stepped.metrics.keys() | expected.metrics.keys()
            }
            _compare_numbers(where, counted, _PAIR_GRADIENT)

    def test_undeclared_mesh_axes_are_refused(self, capabilities: ModelCapabilities) -> None:
        """A recipe that asks for what a model cannot do fails before it starts."""
        for axis in {each.name for each in attrs.fields(MeshConfig)} - capabilities.mesh_axes:
            # `ep` spreads experts over the processes of other axes.
            mesh = MeshConfig(**({axis: 2} if axis != "ep" else {"dp_shard": 2, "ep": 2}))
            if f"policy.mesh.{axis}" not in "".join(undeclared(mesh, capabilities.mesh_axes)):
                fault(f"a recipe with policy.mesh.{axis} = 2 is taken, and the model does not declare that axis")


class BrokenPromiseError(CosmosError):
    """A module that is spread over processes does not do what every other part relies on."""


def inspect(model: Model, module: torch.nn.Module, batches: Sequence[MicroBatch], world: World) -> None:
    """Look at a module on every process of a world, all of which have these micro-batches.

    Raises:
        BrokenPromiseError: Processes say different things, or a stage gives what cannot be passed on.
    """
    if world.mesh.size("pp") > 1:
        pipelined = cast("PipelinedModel", model)
        stages = pipelined.stages(module)
        if not stages:
            raise BrokenPromiseError(f"stages() gave none on rank {world.rank}")
        if world.mesh.place("pp") == 0 and pipelined.advance(stages[0], batches[0], None)._is_view():  # noqa: SLF001
            raise BrokenPromiseError("advance() gave a view: what is passed on is detached in place; give a clone")
        return
    for batch in batches:
        with torch.no_grad():
            logprobs_N = model.decide(module, batch, temperature=1.0).logprobs_N
        if tuple(logprobs_N.shape) != (total := sum(batch.num_decisions),):
            raise BrokenPromiseError(
                f"decide() gave log-probs of shape {tuple(logprobs_N.shape)} for {total} decisions on rank "
                f"{world.rank}; every process that shares the sequences returns all of their decisions"
            )
        for rank, data in enumerate(world.exchange(logprobs_N.numpy().tobytes())):
            other_N = torch.frombuffer(bytearray(data), dtype=logprobs_N.dtype)
            if not torch.allclose(other_N, logprobs_N, rtol=_SAID, atol=_SAID):
                raise BrokenPromiseError(
                    f"decide() gives other log-probs on rank {rank} than on rank {world.rank} for the same "
                    f"micro-batch, by {float((other_N - logprobs_N).abs().max()):.3g}"
                )


def _compare(where: str, found: Stepped, expected: Stepped, *, loss: float, gradient: float) -> None:
    _compare_numbers(where, {"loss": (found.loss, expected.loss)}, loss)
    _compare_gradients(where, found.gradients, expected.gradients, gradient)


def _compare_numbers(where: str, numbers: Mapping[str, tuple[float, float]], allowed: float) -> None:
    for what, (one, other) in numbers.items():
        if not abs(one - other) <= allowed * abs(other):
            fault(f"{where} the {what} is {one:.9g}, in one process {other:.9g}")


def _compare_gradients(
    where: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], allowed: float
) -> None:
    name, error = worst_error(found, expected)
    if not error <= allowed:
        norms = [f"{float(side[name].norm()):.6g}" if name in side else "none" for side in (found, expected)]
        fault(
            f"{where} the gradient of {name} differs from one process's by {error:.3g} of its norm (norms "
            f"{' and '.join(norms)}); is it summed over processes exactly once?"
        )


def _possible(subject: Subject) -> frozenset[Axis]:
    """The declared axes but for those of which planning refuses any recipe."""
    return subject.capabilities.mesh_axes - subject.facts.impossible.keys()


def _policy(subject: Subject, mesh: MeshConfig | None = None, **others: Any) -> PolicyConfig:
    # Two micro-batches at least: what is reduced twice shows at the second one only.
    budget = max(batch.num_units for batch in subject.alone)
    return PolicyConfig(precision="fp32", micro_batch_units=budget, mesh=mesh or MeshConfig(), **others)


PROCESSES: Final = 4
TIMEOUT_S: Final = 200.0
LOSS: Final = 1e-6
GRADIENTS: Final[Mapping[torch.dtype, float]] = {torch.float64: 1e-6, torch.float32: 5e-6}
"""Largest difference of a parameter's gradient, relative to its norm."""
LOGPROB: Final = 1e-6

_LAYOUTS: Final[Sequence[tuple[MeshConfig, Mapping[str, Any]]]] = (
    (MeshConfig(dp_shard=4), {}),
    (MeshConfig(dp_replicate=2, dp_shard=2), {"parallel": ParallelConfig(recompute="selective")}),
    (MeshConfig(dp_shard=2, cp=2), {}),
    (MeshConfig(dp_replicate=2, cp=2), {"parallel": ParallelConfig(recompute="full")}),
    (MeshConfig(dp_shard=2, cp=2), {"lora": LoraConfig(rank=2, alpha=4.0)}),
)


class ModelSpreading:
    """Training steps on four processes, and a loss that is not linear in log-probs on two."""

    def test_axes_together_equal_one_process(self, subject: Subject) -> None:
        """Sums over processes are those of one process: to 1e-6 in float64, in float32 but for its rounding.

        In float32 a gradient that is what is left of larger terms, such as that of the bias of keys, is rounded to some
        1e-6 of its norm in any layout. In float64 what is left are parts that a transformer computes in float32.
        """
        possible = _possible(subject)
        policies = [_policy(subject, mesh, **others) for mesh, others in _LAYOUTS if _axes(mesh) <= possible]
        if not policies:
            pytest.skip("not declared: neither dp_shard nor two axes that this model can be spread over")
        # In float64 all of them; float32 is the same arithmetic, rounded, so one of them tells.
        for dtype, some in ((torch.float64, policies), (torch.float32, policies[:1])):
            alone = {lora: _alone(subject, dtype, lora) for lora in {policy.lora for policy in some}}
            try:
                found = steps_in_layouts(
                    subject.maker, subject.payloads, some, processes=PROCESSES, dtypes=[dtype], timeout_s=TIMEOUT_S
                )
            except WorldFailedError as failure:
                fault(f"a step on {PROCESSES} processes failed:\n{failure}")
            for policy, stepped in zip(some, found, strict=True):
                where = f"with {_named(policy)} in {dtype}"
                trained = [] if policy.lora is None else [name for name in stepped.gradients if not is_adapter(name)]
                if trained:
                    fault(f"{where} {trained[0]} has a gradient, and is no adapter; freeze what adapters are beside")
                _compare(where, stepped, alone[policy.lora], loss=LOSS, gradient=GRADIENTS[dtype])

    def test_a_ratio_over_slices_is_that_of_one_process(self, subject: Subject) -> None:
        """Log-probs are of whole samples on every process of `cp`: clipping those of a slice would be another loss."""
        if "cp" not in _possible(subject):
            pytest.skip("not declared: mesh axis cp")
        make, payloads = subject.maker, list(subject.payloads)
        alone, sliced = (_policy(subject, MeshConfig(cp=cp)) for cp in (1, 2))
        old_N = _clipped(make, payloads, alone, None)[0][0]
        old_N += torch.linspace(-0.3, 0.4, len(old_N))
        expected = _clipped(make, payloads, alone, old_N)
        try:
            spread = run_world(2, _clipped, make, payloads, sliced, old_N, timeout_s=TIMEOUT_S)
        except WorldFailedError as failure:
            fault(f"clipped ratios on 2 processes failed:\n{failure}")
        for rank, found in enumerate(spread):
            for dtype, (logprobs_N, own), (expected_N, gradients) in zip(GRADIENTS, found, expected, strict=True):
                where = f"with cp = 2 in {dtype}"
                if logprobs_N.shape != expected_N.shape:
                    fault(f"{where} rank {rank} has {len(logprobs_N)} log-probs of {len(expected_N)}; give all")
                if not torch.allclose(logprobs_N, expected_N, rtol=LOGPROB, atol=LOGPROB):
                    error = float((logprobs_N - expected_N).abs().max())
                    fault(f"{where} rank {rank}'s log-probs, and so ratios, differ from one process's by {error:.3g}")
                _compare_gradients(f"{where}, of a clipped ratio,", own, gradients, GRADIENTS[dtype])


def _alone(subject: Subject, dtype: torch.dtype, lora: LoraConfig | None) -> Stepped:
    try:
        return step_alone(subject.maker, subject.payloads, _policy(subject, lora=lora), dtype=dtype)
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        fault(f"the model does not compute in {dtype} ({type(error).__name__}: {error}); build() must take it")


def _axes(mesh: MeshConfig) -> frozenset[Axis]:
    axes: tuple[Axis, ...] = ("dp_replicate", "dp_shard", "cp")
    return frozenset(axis for axis in axes if getattr(mesh, axis) > 1)


def _named(policy: PolicyConfig) -> str:
    sizes = [f"{axis} = {getattr(policy.mesh, axis)}" for axis in sorted(_axes(policy.mesh))]
    return ", ".join([*sizes, *(["adapters"] if policy.lora is not None else [])])


def _clipped(
    make: MakeModel, payloads: Sequence[Payload], policy: PolicyConfig, old_N: torch.Tensor | None
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Of each dtype log-probs [N], and gradients of their clipped ratio to old ones, if there are any.

    They are in the order of the payloads: what is padded to a multiple may be packed otherwise.
    """
    model, world = make(), World(form_mesh(policy.mesh, "cpu"))
    batches = packed(model, payloads, policy, world)
    places = _places(batches)
    results = []
    for dtype in GRADIENTS:
        module = build_part(model, policy, world, seed=SEED, dtype=dtype)
        found: list[torch.Tensor] = []
        for batch, places_N in zip(batches, places, strict=True):
            logprobs_N = model.decide(module, batch, temperature=1.0).logprobs_N
            if old_N is not None:
                ratio_N = (logprobs_N - old_N[places_N[: len(logprobs_N)]]).exp()
                torch.maximum(-ratio_N, -ratio_N.clamp(0.9, 1.1)).sum().backward()  # type: ignore[no-untyped-call]
            found.append(logprobs_N.detach())
        gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        all_N = torch.cat(found)
        results.append((all_N[torch.cat(places)[: len(all_N)].argsort()], whole(gradients, world)))
    return results


def _places(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Of each micro-batch, where its decisions are [N] among all, sequence by sequence."""
    keys = [
        [(piece.sequence, number) for piece in pieces(batch) for number in piece.of(range(piece.span.total))]
        for batch in batches
    ]
    places = {key: place for place, key in enumerate(sorted(itertools.chain(*keys)))}
    return [torch.tensor([places[key] for key in of_batch]) for of_batch in keys]
