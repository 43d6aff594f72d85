"""Tries a layout: a training step of a small model of a recipe's make, on two processes and on one.

Plans of tensor parallelism, of pipeline stages and of experts are derived from what a module looks like. What it does
beside that is found by trying: the loss and every gradient are those of one process, or the axis is refused.

The step is the product's own: sequences are shared among processes, packed, evaluated and reduced as in a run, in two
micro-batches or more.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import MeshConfig, OptimizerConfig, PolicyConfig
from cosmos_core.errors import CosmosError
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence, balanced, units_of
from cosmos_core.policy.batches.share import data_place, data_size
from cosmos_core.policy.mesh.layout import STAGES_PER_RANK, layout_of
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.training.metrics import Meter, Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Decisions, Loss, Model, PlainAlgorithm
from cosmos_core.protocols.layout import Axis
from cosmos_core.protocols.model import Trial, TriedModel
from cosmos_core.storage.scratch import scratch
from cosmos_core.types import Group, Payload

_CPU: Final = torch.device("cpu")
_PROCESSES: Final = 2
TRIAL_UNITS: Final = 64
"""The budget of a trial's micro-batches."""
_TIMEOUT_S: Final = 120.0
_TOLERANCE: Final = 1e-4
"""Of the loss and of a gradient's norm, relative: float32 in another order gives 1e-6."""
_FAILURES: Final = (ProcessRaisedException, ProcessExitedException, TimeoutError)


def try_axes(policy: PolicyConfig, model: Model, axes: Collection[Axis]) -> dict[Axis, str]:
    """The axes, of some that the policy's mesh has, that this model does not bear, and why.

    A model that is no `TriedModel`, or gives no small one, is not tried.
    """
    if not axes or not isinstance(model, TriedModel):
        return {}
    stages = _PROCESSES * STAGES_PER_RANK[policy.parallel.schedule]
    trial = model.trial(num_layers=stages if "pp" in axes else 1)
    if trial is None:
        return {}
    found: dict[Axis, str] = {}
    remaining = sorted(axes)
    while remaining:
        policies = {axis: _small(policy, _sizes(axis)) for axis in remaining}
        with scratch("trial") as folder:
            outcomes = folder / "outcomes.jsonl"
            outcomes.touch()
            failure = _world(outcomes, trial, policies)
            told = [json.loads(line) for line in outcomes.read_text().splitlines()]
        found |= {axis: reason for axis, reason in told if reason}
        remaining = remaining[len(told) :]
        if failure and remaining:
            found[remaining.pop(0)] = f"a small model of its make fails on {_PROCESSES} processes: {failure}"
    return found


def _sizes(axis: Axis) -> dict[str, int]:
    """A mesh with one axis of two processes; experts are spread over an axis that there is besides."""
    axes = ("ep", "dp_shard") if axis == "ep" else (axis,)
    return dict.fromkeys(axes, _PROCESSES)


def _small(policy: PolicyConfig, sizes: Mapping[str, int]) -> PolicyConfig:
    """A policy with a mesh of these sizes, in numbers that can be compared."""
    parallel = attrs.evolve(policy.parallel, compile="off", cpu_offload=False)
    mesh = attrs.evolve(MeshConfig(), **sizes)
    return PolicyConfig(precision="fp32", micro_batch_units=TRIAL_UNITS, mesh=mesh, parallel=parallel)


def _world(outcomes: Path, trial: Trial, policies: Mapping[Axis, PolicyConfig]) -> str:
    """Run the processes; the reason why they failed, empty if they did not."""
    deadline = time.monotonic() + _TIMEOUT_S
    # A fork server may run already; the planner itself has threads, which no fork survives.
    context = start_processes(  # type: ignore[no-untyped-call]
        _member, (outcomes, trial, policies), nprocs=_PROCESSES, join=False, daemon=True, start_method="forkserver"
    )
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=0.0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"they did not finish a step within {_TIMEOUT_S:.0f} s")
    except _FAILURES as error:
        kind, _, said = str(error).strip().splitlines()[-1].partition(": ")
        return said if kind.startswith(CosmosError.__module__) else f"{kind}: {said}".removesuffix(": ")
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return ""


def _member(rank: int, outcomes: Path, trial: Trial, policies: Mapping[Axis, PolicyConfig]) -> None:
    """One process; the first compares, and writes down what it finds of each axis."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{outcomes.with_suffix('.store')}",
        rank=rank,
        world_size=_PROCESSES,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    expected = step_in(trial.make(), trial.payloads, _small(PolicyConfig(), {}), single_world())
    for axis, policy in policies.items():
        found = step_in(trial.make(), trial.payloads, policy, World(form_mesh(policy.mesh, "cpu")))
        if rank == 0:
            with outcomes.open("a") as file:
                file.write(json.dumps([axis, _difference(found, expected)]) + "\n")
    dist.barrier()


def _difference(found: Stepped, expected: Stepped) -> str:
    """The difference of a step from the one of one process, in words; empty if there is none."""
    name, error = worst_error(found.gradients, expected.gradients)
    off = abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-12)
    if max(error, off) <= _TOLERANCE:
        return ""
    return (
        f"a small model of its make trains otherwise on {_PROCESSES} processes than on one: loss {found.loss:.6g} "
        f"against {expected.loss:.6g}, gradient norm {found.norm:.4g} against {expected.norm:.4g}, furthest off {name}"
    )


class Imitation(PlainAlgorithm):
    """Makes every decision likelier, the unlikely ones more, so that a gradient depends on every log-prob."""

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """Value every sample alike."""
        return [[1.0] * len(group.samples) for group in groups]

    def loss(self, decisions: Decisions) -> Loss:
        """The weighed negative log-probability, and an eighth of its square."""
        return Loss(loss_N=decisions.advantages_N * (decisions.logprobs_N.square() / 8 - decisions.logprobs_N))


@attrs.frozen(kw_only=True, eq=False)
class Stepped:
    """The results of a step.

    Attributes:
        weights: Every parameter before the step, whole, by name.
        loss: Of the whole batch.
        norm: Of its gradient, as it is clipped by.
        gradients: Of every parameter, whole, by name.
        metrics: What the model reports of what it counted (see `MoEModel`), by name.
    """

    weights: Mapping[str, torch.Tensor]
    loss: float
    norm: float
    gradients: Mapping[str, torch.Tensor]
    metrics: Mapping[str, float]


def step_in(
    model: Model,
    payloads: Sequence[Payload],
    policy: PolicyConfig,
    world: World,
    dtype: torch.dtype = torch.float32,
) -> Stepped:
    """The step in a world, of which every process calls it."""
    trainer = make_trainer(model, policy, world, dtype=dtype)
    parameters = dict(trainer.module.named_parameters())
    weights = whole(parameters, world)
    meter = train_step(trainer, payloads)
    # The trainer measures these two itself.
    measured = {name: value for name, value in meter.maxima.items() if name not in ("grad_norm", "lr")}
    told = [json.loads(data) for data in world.exchange(json.dumps([meter.sums.get("loss", 0.0), measured]).encode())]
    return Stepped(
        weights=weights,
        loss=sum(loss for loss, _ in told),
        norm=meter.maxima["grad_norm"],
        gradients=whole({name: p.grad for name, p in parameters.items() if p.grad is not None}, world),
        metrics={name: max(found.get(name, -math.inf) for _, found in told) for _, each in told for name in each},
    )


def make_trainer(
    model: Model,
    policy: PolicyConfig,
    world: World,
    *,
    seed: int = 0,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> Trainer:
    """A trainer of demonstrations on this process of a world; with float64 weights it computes in float64, too."""
    layout = layout_of(policy, world.mesh, device.type)
    if dtype == torch.float64:
        layout = attrs.evolve(layout, micro_batch_precision="float64")
    module = model.build(seed=seed, dtype=dtype, device=device, layout=layout)
    trainer = Trainer(model=model, module=module, policy=policy, device=device, world=world)
    stage = Stage(
        index=0, key="algorithm", plugin="imitation", options={}, steps=1000, prompts_per_step=1,
        optimizer=OptimizerConfig(lr=1e-3, clip_norm=0.0), first_step=0,
    )  # fmt: skip
    trainer.begin_stage(stage, Imitation(), 1.0)
    return trainer


def train_step(trainer: Trainer, payloads: Sequence[Payload]) -> Meter:
    """Train on a batch of demonstrations, shared among the processes; this process's metrics."""
    share = share_of(payloads, trainer.world)
    return trainer.train(share, share.counts, solo(), Stopwatch(trainer.device)).meter


def share_of(payloads: Sequence[Payload], world: World) -> Share:
    """This process's share of a batch of demonstrations, each with a weight of its own."""
    sequences = [TrainSequence(payload=p, advantage=1.0 + 0.25 * (i % 3), place=i) for i, p in enumerate(payloads)]
    units = [units_of(payload) for payload in payloads]
    lengths = [each.conditioning + each.decisions for each in units]
    mesh = world.mesh
    mine = balanced(lengths, data_size(mesh))[data_place(mesh)]
    return Share(
        sequences=tuple(sequences[index] for index in mine),
        counts=Counts(
            sequences=len(payloads),
            decisions=sum(each.decisions for each in units),
            prompt_units=sum(each.conditioning for each in units),
            trained=len(payloads),
        ),
        filler=None if mine else sequences[0],
    )


def whole(tensors: Mapping[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
    """Whole tensors of all stages, on every process."""
    own = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }
    mesh = world.mesh
    if mesh.size("pp") == 1:
        return own
    gathered: list[Any] = [None] * mesh.size("pp")
    torch.distributed.all_gather_object(gathered, own, group=mesh.group("pp"))
    return {name: tensor for stage in gathered for name, tensor in stage.items()}


def worst_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """The tensor that is furthest off, relative to its norm; infinitely, if it is missing on either side."""
    if different := sorted(found.keys() ^ expected.keys()):
        return different[0], math.inf
    errors: dict[str, float] = {}
    for name, whole_one in expected.items():
        difference = (found[name].double() - whole_one.double()).norm()
        errors[name] = float(difference / whole_one.double().norm().clamp_min(1e-30)) if difference > 0 else 0.0
    return max(errors.items(), key=lambda each: each[1])
