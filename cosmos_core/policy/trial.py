"""Tries a layout: a training step of a small model of a recipe's make, on two processes and on one.

Plans of tensor parallelism, of pipeline stages and of experts are derived from what a module looks like. What it does
beside that is found by trying: the loss and every gradient are those of one process, or the axis is refused.

The step is the product's own: sequences are shared among processes, packed, evaluated and reduced as in a run, in two
micro-batches or more. What could not be tried, for a reason of the small model or of the machine, is told.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import MeshConfig, PolicyConfig
from cosmos_core.errors import CosmosError, UnevenError, UntriedError
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence, balanced, units_of
from cosmos_core.policy.batches.share import data_place, data_size
from cosmos_core.policy.mesh.layout import STAGES_PER_RANK, layout_of, misfits
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.training.metrics import Meter, Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Decisions, Loss, Model, ModelCapabilities, ModelFacts, PlainAlgorithm
from cosmos_core.protocols.layout import Axis
from cosmos_core.protocols.model import Trial, TriedModel
from cosmos_core.scratch import scratch
from cosmos_core.types import Group, Payload

_CPU: Final = torch.device("cpu")
_PROCESSES: Final = 2
TRIAL_UNITS: Final = 64
"""The budget of a trial's micro-batches."""
_TIMEOUT_S: Final = 120.0
"""Of what comes before the first axis, and of each axis."""
_TOLERANCE: Final = 1e-4
"""Of the loss and of a gradient's norm, relative: float32 in another order gives 1e-6."""

_Kind: TypeAlias = Literal["begun", "failed", "uneven", "untried"]


@attrs.frozen(kw_only=True)
class Findings:
    """Axes that a model does not bear, and axes that could not be tried, and why."""

    refused: dict[Axis, str] = attrs.field(factory=dict)
    untried: dict[Axis, str] = attrs.field(factory=dict)


def tried(policy: PolicyConfig, model: Model, capabilities: ModelCapabilities) -> ModelFacts:
    """The facts of a model, with what was found of the axes of the policy's mesh on a small one of its make."""
    facts = model.facts()
    # Measured here, where a config whose numbers do not fit together can be refused.
    facts = attrs.evolve(facts, parts=tuple(facts.parts))
    # Replicas of all of it are cut nowhere.
    used = {axis for axis in capabilities.mesh_axes - {"dp_replicate"} if getattr(policy.mesh, axis) > 1}
    # A mesh that does not fit is refused as it is.
    if misfits(policy, capabilities, facts):
        return facts
    found = try_axes(policy, model, used)
    notices = list(facts.notices)
    for reason in dict.fromkeys(found.untried.values()):
        axes = ", ".join(f"policy.mesh.{axis}" for axis, each in found.untried.items() if each == reason)
        notices.append(f"{axes}: not tried whether a small model of its make trains so as on one process: {reason}")
    return attrs.evolve(facts, impossible={**facts.impossible, **found.refused}, notices=tuple(notices))


def try_axes(policy: PolicyConfig, model: Model, axes: Collection[Axis]) -> Findings:
    """Try a model along some axes of the policy's mesh, each alone; one that is no `TriedModel` needs no trial."""
    found, remaining = Findings(), sorted(axes)
    if not remaining or not isinstance(model, TriedModel):
        return found
    stages = _PROCESSES * STAGES_PER_RANK[policy.parallel.schedule]
    try:
        trial = model.trial(num_layers=stages if "pp" in axes else 1)
    except UntriedError as error:
        return Findings(untried=dict.fromkeys(remaining, str(error)))
    while trial is not None and remaining:
        policies = {axis: _small(policy, _sizes(axis)) for axis in remaining}
        with scratch("trial") as folder:
            outcomes = folder / "outcomes.jsonl"
            outcomes.touch()
            fault = _world(outcomes, trial, policies)
            told = [json.loads(line) for line in outcomes.read_text().splitlines()]
        found.refused.update((axis, reason) for axis, reason in told if axis in policies and reason)
        remaining = [axis for axis in remaining if axis not in dict(told)]
        # The process that failed first says so first.
        kind, said = next(((kind, said) for kind, said in told if kind in get_args(_Kind)[1:]), ("", ""))
        if fault or kind in {"", "untried"} or "begun" not in dict(told):
            # The machine, or one process alone, would fail for the next axis, too.
            found.untried.update(dict.fromkeys(remaining, fault or said or "its processes ended without a word"))
            break
        if remaining and kind == "uneven":
            found.untried[remaining.pop(0)] = said
        elif remaining:
            reason = f"a small model of its make fails on {_PROCESSES} processes: {said}"
            found.refused[remaining.pop(0)] = reason
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
    """Run the processes; the reason why the machine did not let them finish, empty if it did."""
    # A fork server may run already; the planner itself has threads, which no fork survives.
    make = multiprocessing.get_context("forkserver").Process
    started: dict[Any, BaseProcess] = {}
    try:
        for rank in range(_PROCESSES):
            process = make(target=_member, args=(rank, outcomes, trial, policies), daemon=True)
            process.start()
            started[process.sentinel] = process
        return _watch(outcomes, dict(started))
    except (OSError, EOFError) as error:
        return f"its processes cannot be started: {error!r}"
    finally:
        for each in started.values():
            each.kill()
            each.join()


def _watch(outcomes: Path, running: dict[Any, BaseProcess]) -> str:
    size, deadline = 0, time.monotonic() + _TIMEOUT_S
    while running:
        codes = set()
        for sentinel in wait(list(running), timeout=1.0):
            ended = running.pop(sentinel)
            ended.join()
            codes.add(ended.exitcode or 0)
        # One that raises has written down what, and ends with 1.
        if killed := codes - {0, 1}:
            return f"a process ended with exit code {min(killed)}; the machine may lack memory for it"
        if 1 in codes:
            break
        if (grown := outcomes.stat().st_size) > size:
            size, deadline = grown, time.monotonic() + _TIMEOUT_S
        elif time.monotonic() > deadline:
            return (
                f"{_PROCESSES} processes did not finish a step within {_TIMEOUT_S:.0f} s; if the machine is busy, plan "
                "again later, else they wait for one another"
            )
    return ""


def _tell(outcomes: Path, what: Axis | _Kind, said: str = "") -> None:
    with outcomes.open("a") as file:
        file.write(json.dumps([what, said]) + "\n")


def _member(rank: int, outcomes: Path, trial: Trial, policies: Mapping[Axis, PolicyConfig]) -> None:
    """One process; what it raises it writes down."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    try:
        _compare(rank, outcomes, trial, policies)
    except Exception as error:  # noqa: BLE001 - the supervised boundary of this process
        line = next(iter(str(error).strip().splitlines()), "")
        said = line if isinstance(error, CosmosError) else f"{type(error).__name__}: {line}".removesuffix(": ")
        is_of_machine = isinstance(error, MemoryError | OSError | dist.DistError) or "allocate memory" in said
        _tell(outcomes, "untried" if is_of_machine else "uneven" if isinstance(error, UnevenError) else "failed", said)
        raise SystemExit(1) from None


def _compare(rank: int, outcomes: Path, trial: Trial, policies: Mapping[Axis, PolicyConfig]) -> None:
    """Compare the steps; the first process writes down what it finds of each axis."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{outcomes.with_suffix('.store')}",
        rank=rank,
        world_size=_PROCESSES,
        # Whoever started them is the first to give up.
        timeout=timedelta(seconds=2 * _TIMEOUT_S),
    )
    expected = step_in(trial.make(), trial.payloads, _small(PolicyConfig(), {}), single_world())
    done: tuple[Axis | _Kind, str] = "begun", ""
    for axis, policy in policies.items():
        if rank == 0:
            _tell(outcomes, *done)
        # What fails from here on is the next axis's.
        dist.barrier()
        found = step_in(trial.make(), trial.payloads, policy, World(form_mesh(policy.mesh, "cpu")))
        done = axis, _difference(found, expected)
    if rank == 0:
        _tell(outcomes, *done)
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
    model: Model, payloads: Sequence[Payload], policy: PolicyConfig, world: World, dtype: torch.dtype = torch.float32
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
        optimizer=attrs.evolve(policy.optimizer, lr=1e-3, clip_norm=0.0), first_step=0,
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
