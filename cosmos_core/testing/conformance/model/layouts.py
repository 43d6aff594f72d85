"""Compares training steps on several processes, along each axis that a model declares, with one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final, get_args

import pytest
import torch

from cosmos_core.config.schema import LoraConfig, MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.models.adapters import is_adapter
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.microbatch import pieces
from cosmos_core.protocols import MicroBatch, Model, ModelCapabilities, ModelContext
from cosmos_core.protocols.layout import Axis
from cosmos_core.testing.conformance.model.subject import SEED, ModelSetting, first_difference, inspect, pack_alone
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import (
    MakeModel,
    PluginModel,
    Stepped,
    build_part,
    packed,
    step_alone,
    steps_in_layouts,
    whole,
    worst_error,
)
from cosmos_core.testing.worlds import WorldFailedError, run_world
from cosmos_core.types import JSON, Payload

_PAIR: Final = 2
_PIPELINED: Final = ("stages", "advance", "conclude")
_PAIR_LOSS: Final = 1e-5
_PAIR_GRADIENT: Final = 1e-4
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
        policies = [_pair_policy(axis, budget) for axis in axes]
        try:
            found = steps_in_layouts(make, payloads, policies, processes=_PAIR, inspect=inspect)
        except WorldFailedError as error:
            fault(f"a step with {', '.join(axes)} of {_PAIR}, one after another, failed:\n{error}")
        expected = step_alone(make, payloads, PolicyConfig(precision="fp32", micro_batch_units=budget))
        for axis, stepped in zip(axes, found, strict=True):
            _compare(axis, stepped, expected)


def _pair_policy(axis: Axis, budget: int) -> PolicyConfig:
    # Experts are spread over processes that another axis makes.
    sizes = {axis: _PAIR} | ({"dp_shard": _PAIR} if axis == "ep" else {})
    return PolicyConfig(precision="fp32", micro_batch_units=budget, mesh=MeshConfig(**sizes))


def _compare(axis: Axis, found: Stepped, expected: Stepped) -> None:
    if name := first_difference(found.weights, expected.weights):
        fault(f"with {axis} = {_PAIR} build() makes other weights: {name}; they must not depend on the layout")
    _compare_numbers(axis, {"loss": (found.loss, expected.loss, _PAIR_LOSS)})
    _compare_gradients(axis, found, expected)
    numbers = {"norm of the gradient": (found.norm, expected.norm, _PAIR_GRADIENT)}
    for name in found.metrics.keys() | expected.metrics.keys():
        values = (found.metrics.get(name, math.nan), expected.metrics.get(name, math.nan))
        numbers[f"{name} of after_step()"] = (*values, _PAIR_GRADIENT)
    _compare_numbers(axis, numbers)


def _compare_numbers(axis: Axis, numbers: Mapping[str, tuple[float, float, float]]) -> None:
    for what, (one, other, allowed) in numbers.items():
        if not abs(one - other) <= allowed * abs(other):
            fault(f"with {axis} = {_PAIR} the {what} is {one:.9g}, in one process {other:.9g}")


def _compare_gradients(axis: Axis, found: Stepped, expected: Stepped) -> None:
    name, error = worst_error(found.gradients, expected.gradients)
    if not error <= _PAIR_GRADIENT:
        norms = [
            float(side[name].norm()) if name in side else torch.nan for side in (found.gradients, expected.gradients)
        ]
        fault(
            f"with {axis} = {_PAIR} the gradient of {name} differs from one process's by {error:.3g} of its norm "
            f"(norms {norms[0]:.6g} and {norms[1]:.6g}); is it summed over processes exactly once?"
        )


PROCESSES: Final = 4
TIMEOUT_S: Final = 200.0
LOSS: Final = 1e-6
GRADIENTS: Final[Mapping[torch.dtype, float]] = {torch.float64: 1e-6, torch.float32: 5e-6}
"""Largest difference of a parameter's gradient, relative to its norm."""
LOGPROB: Final = 1e-6

_LORA: Final = LoraConfig(rank=2, alpha=4.0)
_LAYOUTS: Final[Sequence[tuple[MeshConfig, ParallelConfig | None, LoraConfig | None]]] = (
    (MeshConfig(dp_shard=4), None, None),
    (MeshConfig(dp_replicate=2, dp_shard=2), ParallelConfig(recompute="selective"), None),
    (MeshConfig(dp_shard=2, cp=2), None, None),
    (MeshConfig(dp_replicate=2, cp=2), ParallelConfig(recompute="full"), None),
    (MeshConfig(dp_shard=2, cp=2), None, _LORA),
)


class ModelSpreading(ModelSetting):
    """Training steps on four processes, and a loss that is not linear in log-probs on two."""

    @pytest.fixture
    def batch(self, payloads: Sequence[Payload]) -> Sequence[Payload]:
        """The batch that is trained on."""
        return payloads

    @pytest.fixture
    def maker(self, options: Mapping[str, JSON], context: ModelContext) -> MakeModel:
        """Makes the model in other processes."""
        return PluginModel(plugin=self.plugin, options=options, context=context)

    def test_axes_together_equal_one_process(
        self, capabilities: ModelCapabilities, maker: MakeModel, model: Model, batch: Sequence[Payload]
    ) -> None:
        """Sums over processes are those of one process: to 1e-6 in float64, in float32 but for its rounding.

        In float32 a gradient that is what is left of larger terms, such as that of the bias of keys, is rounded to some
        1e-6 of its norm in any layout. In float64 what is left are parts that a transformer computes in float32.
        """
        possible = _possible(capabilities, model)
        policies = [_policy(model, batch, *layout) for layout in _LAYOUTS if _axes(layout[0]) <= possible]
        if not policies:
            pytest.skip("not declared: neither dp_shard nor two axes that this model can be spread over")
        # In float64 all of them; float32 is the same arithmetic, rounded, so one of them tells.
        asked = {torch.float64: policies, torch.float32: policies[:1]}
        alone = {
            (lora, dtype): _alone(maker, batch, _policy(model, batch, MeshConfig(), None, lora), dtype)
            for dtype, some in asked.items()
            for lora in {policy.lora for policy in some}
        }
        try:
            found = [
                (dtype, policy, stepped)
                for dtype, some in asked.items()
                for policy, stepped in zip(
                    some,
                    steps_in_layouts(maker, batch, some, processes=PROCESSES, dtypes=[dtype], timeout_s=TIMEOUT_S),
                    strict=True,
                )
            ]
        except WorldFailedError as failure:
            fault(f"a step on {PROCESSES} processes failed:\n{failure}")
        for dtype, policy, stepped in found:
            expected, where = alone[policy.lora, dtype], f"with {_named(policy)} in {dtype}"
            trained = [] if policy.lora is None else [name for name in stepped.gradients if not is_adapter(name)]
            if trained:
                fault(f"{where} {trained[0]} has a gradient, and is no adapter; freeze what adapters are beside")
            if not abs(stepped.loss - expected.loss) <= LOSS * abs(expected.loss):
                fault(f"{where} the loss is {stepped.loss:.9g}, in one process {expected.loss:.9g}")
            name, error = worst_error(stepped.gradients, expected.gradients)
            if not error <= GRADIENTS[dtype]:
                fault(f"{where} the gradient of {name} differs from one process's by {error:.3g} of its norm")

    def test_a_ratio_over_slices_is_that_of_one_process(
        self, capabilities: ModelCapabilities, maker: MakeModel, model: Model, batch: Sequence[Payload]
    ) -> None:
        """Log-probs are of whole samples on every process of `cp`: clipping those of a slice would be another loss."""
        if "cp" not in _possible(capabilities, model):
            pytest.skip("not declared: mesh axis cp")
        alone, sliced = (_policy(model, batch, MeshConfig(cp=cp)) for cp in (1, 2))
        old_N = _clipped(maker, batch, alone, None)[0][0]
        old_N += torch.linspace(-0.3, 0.4, len(old_N))
        expected = _clipped(maker, batch, alone, old_N)
        try:
            spread = run_world(2, _clipped, maker, list(batch), sliced, old_N, timeout_s=TIMEOUT_S)
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
                name, error = worst_error(own, gradients)
                if not error <= GRADIENTS[dtype]:
                    fault(f"{where} the gradient of a clipped ratio by {name} differs by {error:.3g} of its norm")


def _alone(make: MakeModel, payloads: Sequence[Payload], policy: PolicyConfig, dtype: torch.dtype) -> Stepped:
    try:
        return step_alone(make, payloads, policy, dtype=dtype)
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        fault(f"the model does not compute in {dtype} ({type(error).__name__}: {error}); build() must take it")


def _possible(capabilities: ModelCapabilities, model: Model) -> frozenset[Axis]:
    return capabilities.mesh_axes - model.facts().impossible.keys()


def _policy(
    model: Model,
    payloads: Sequence[Payload],
    mesh: MeshConfig,
    parallel: ParallelConfig | None = None,
    lora: LoraConfig | None = None,
) -> PolicyConfig:
    return PolicyConfig(
        precision="fp32",
        micro_batch_units=max(pack_alone(model, payload).num_units for payload in payloads),
        mesh=mesh,
        parallel=parallel or ParallelConfig(),
        lora=lora,
    )


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
    results = []
    for dtype in GRADIENTS:
        module = build_part(model, policy, world, seed=SEED, dtype=dtype)
        found: list[torch.Tensor] = []
        batches = packed(model, payloads, policy, world)
        places = _places(batches)
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
