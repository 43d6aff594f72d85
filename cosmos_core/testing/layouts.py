"""The same training step in any layout: its loss and its gradients, to be compared with one process.

The step is the product's own: sequences are shared among processes, packed, evaluated and reduced as in a run, in two
micro-batches or more.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch.distributed.tensor import DTensor

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import OptimizerConfig, PolicyConfig
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence, balanced, units_of
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.training.metrics import Meter, Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Decisions, Loss, Model, ModelContext, PlainAlgorithm
from cosmos_core.testing.worlds import run_world
from cosmos_core.types import JSON, Group, Payload

CPU: Final = torch.device("cpu")


@attrs.frozen(kw_only=True)
class PluginModel:
    """Makes a plugin's model, in any process.

    Attributes:
        plugin: The name with which recipes select it.
        options: Its options.
        context: What the recipe says of the model.
    """

    plugin: str
    options: Mapping[str, JSON] = attrs.field(factory=dict)
    context: ModelContext

    def __call__(self) -> Model:
        """The model."""
        made: Model = PluginSet.load([("model", self.plugin)]).create("model", self.plugin, self.options, self.context)
        return made


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


def step_alone(
    make: Callable[[], Model], payloads: Sequence[Payload], policy: PolicyConfig, *, dtype: torch.dtype = torch.float32
) -> Stepped:
    """The step in this process."""
    return _step(make(), payloads, policy, single_world(), dtype)


def steps_in_layouts(
    make: Callable[[], Model],
    payloads: Sequence[Payload],
    policies: Sequence[PolicyConfig],
    *,
    processes: int,
    dtypes: Sequence[torch.dtype] = (),
    timeout_s: float = 200.0,
) -> list[Stepped]:
    """The step in several layouts of as many processes, one after another in the same world.

    Args:
        make: Makes the model, on each process for each layout; can be pickled.
        payloads: The batch.
        policies: A layout each.
        processes: Processes of every layout.
        dtypes: Of the weights in each layout, float32 if not given; with float64 ones a model computes in float64, too.
        timeout_s: Longest time for all of them.

    Raises:
        WorldFailedError: A process failed.
    """
    asked = make, list(payloads), list(zip(policies, dtypes or [torch.float32] * len(policies), strict=True))
    stepped: list[Stepped] = run_world(processes, _steps, *asked, timeout_s=timeout_s)[0]
    return stepped


def _steps(
    make: Callable[[], Model], payloads: Sequence[Payload], layouts: Sequence[tuple[PolicyConfig, torch.dtype]]
) -> list[Stepped]:
    steps = [_step(make(), payloads, policy, World(form_mesh(policy.mesh, "cpu")), dtype) for policy, dtype in layouts]
    return steps if torch.distributed.get_rank() == 0 else []


def _step(model: Model, payloads: Sequence[Payload], policy: PolicyConfig, world: World, dtype: torch.dtype) -> Stepped:
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
    device: torch.device = CPU,
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
    place = mesh.place("dp_replicate") * mesh.size("dp_shard") + mesh.place("dp_shard")
    mine = balanced(lengths, mesh.size("dp_replicate") * mesh.size("dp_shard"))[place]
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
