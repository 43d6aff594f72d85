"""`python -m cosmos_core.policy`: the process of a policy replica."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import closing
from typing import Final, get_args

import torch
from torch import nn

from cosmos_core.config.job import Job, stages
from cosmos_core.config.schema import Recipe
from cosmos_core.config.training import DTYPES
from cosmos_core.devices import choose_device, num_threads, stay_near
from cosmos_core.errors import DamagedCheckpointError
from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.models.parallel.stages import part_of, stages_of
from cosmos_core.plugins.recipe import load_algorithm, load_dataset, load_model, selections, source_of
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.batches.share import ShareReader
from cosmos_core.policy.checkpoints.checkpoint import completed
from cosmos_core.policy.checkpoints.frozen_digest import DRAWN
from cosmos_core.policy.checkpoints.reader import restore
from cosmos_core.policy.checkpoints.saver import CheckpointSaver
from cosmos_core.policy.orders import LeaderOrders, Orders
from cosmos_core.policy.processes.bootstrap import Bond, bond, form_world, leave
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.publication import Publications
from cosmos_core.policy.replica import PolicyReplica, UnitRate, make_turns
from cosmos_core.policy.training.setup import StageSettings, make_trainer
from cosmos_core.policy.training.step import StepRunner, schema
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Model
from cosmos_core.protocols.layout import Axis
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.replica.client import ControlClient
from cosmos_core.replica.process import RoleArgs, run_role
from cosmos_core.replica.profiler import Profiler
from cosmos_core.replica.turns import RoleLock, role_lock
from cosmos_core.storage.parts import FOLDER, PartWriter
from cosmos_core.transport.addresses import Place, host_id, join_places, rack_id, split_places
from cosmos_core.transport.payloads import PayloadClient
from cosmos_core.transport.reports import Troubled
from cosmos_core.weights.disk import VersionWriter
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.shards import torch_dtype

FLUSH_S: Final = 10.0

_LOG: Final = logging.getLogger(__name__)


def main(args: RoleArgs) -> None:
    """Train until the controller says stop."""
    recipe = args.job.recipe
    # A fork may have read another number as it loaded torch.
    torch.set_num_threads(num_threads(recipe.launch.threads))
    torch.manual_seed(recipe.run.seed)
    bound = bond(args)
    with bound.line:
        device = choose_device("policy.device", recipe.policy.device)
        stay_near(device)
        world = form_world(args, bound, device)
        with role_lock(args, world.agree) as lock:
            _work(args, bound, world, lock)
    leave(world)


def _work(args: RoleArgs, bound: Bond, world: World, lock: RoleLock | None) -> None:
    job, recipe = args.job, args.job.recipe
    plugins = PluginSet.load(selections(recipe, ("model", "algorithm", "dataset")))
    model = load_model(job, plugins)
    trainer = make_trainer(job, model, world, plugins)
    _LOG.info("place on the mesh: %s", place_of(world, trainer.module))
    settings = StageSettings(job, plugins, trainer)
    settings.begin_stage(0)
    go_on_from = functools.partial(_go_on_from, job, trainer, settings.begin_stage)
    if args.checkpoint is not None:
        go_on_from(args.checkpoint)
    turns = None if lock is None else make_turns(lock, trainer, job.directory)
    writer = make_writer(job, world)
    samples = PartWriter(job.directory / FOLDER, "steps", args.replica, schema, recipe.samples.max_bytes)
    with (
        closing(samples),
        WeightPublisher(job.run_id, args.address, keyring=args.keyring, writer=writer) as publisher,
        PayloadClient(args.keyring) as payloads,
    ):
        weights = _weights_endpoint(publisher, world)
        orders = Orders(world, bound.line)
        if bound.store is not None:
            client = args.connect(
                endpoints={"weights": weights, "store": bound.store.endpoint},
                step=trainer.step,
                gauges=UnitRate(trainer, turns),
                take_pulse=trainer.activity.pulse,
            )
            orders = LeaderOrders(client, world, bound.line, args.stop)
            samples.tell = functools.partial(_tell_unwritten, client)
        replica = PolicyReplica(
            name=args.replica,
            run_id=job.run_id,
            address=bound.address,
            orders=orders,
            trainer=trainer,
            runner=StepRunner(
                trainer=trainer,
                reader=make_reader(job, plugins, trainer, payloads),
                num_heldout=job.num_measured_prompts,
                samples=samples if world.rank == 0 and recipe.samples.max_bytes else None,
            ),
            publications=_publications(publisher, recipe, model, orders, world),
            saver=CheckpointSaver(job.checkpoints, recipe.policy.checkpoint.keep, orders.report, open_channel()),
            begin_stage=settings.begin_stage,
            restore=go_on_from,
            adopt=settings.adopt,
            profiler=Profiler(job.directory, args.replica, orders.report, rank=world.rank, exchange=world.exchange),
            turns=turns,
        )
        replica.run()
        # What cannot be written is told yet.
        samples.close()
        if args.client is not None:
            args.client.flush(FLUSH_S)


def _publications(
    publisher: WeightPublisher, recipe: Recipe, model: Model, orders: Orders, world: World
) -> Publications:
    return Publications(
        publisher,
        torch_dtype(DTYPES[recipe.rollout.precision]),
        orders.report,
        open_channel(),
        form=FORMATS.get(recipe.rollout.quantization),
        matrices=model.facts().matrices,
        exchange=world.exchange,
    )


def _tell_unwritten(client: ControlClient, number: int, why: str) -> None:
    client.report(Troubled(what="advantages of prompts that could not be written", number=number, last=why))


def _go_on_from(job: Job, trainer: Trainer, begin_stage: Callable[[int], None], checkpoint: str) -> None:
    try:
        restore(trainer, checkpoint, begin_stage, run_id=job.run_id, name=job.recipe.model.path or DRAWN)
    except DamagedCheckpointError as error:
        step, there = int(checkpoint.rpartition("step-")[2]), completed(job.checkpoints)
        before = max((each for each in there if each < step), default=0)
        start = "previous" if before and step == there[-1] else f"step-{before}"
        where = f"step {before}" if before else "the run's beginning"
        remedy = f"cosmos run --resume {job.directory} --from {start} goes on from {where}"
        raise DamagedCheckpointError(f"{error}; {remedy}") from error


def place_of(world: World, module: nn.Module) -> str:
    """This process's place in its replica, in words: on every axis that has several, and the layers of its stages.

    Args:
        world: The replica's processes.
        module: What this process holds of the model.
    """
    if world.size == 1:
        return "the replica's only process"
    mesh = world.mesh
    axes = [f"{axis} {mesh.place(axis)} of {mesh.size(axis)}" for axis in get_args(Axis) if mesh.size(axis) > 1]
    parts = [part for stage in stages_of(module) if (part := part_of(stage)) is not None]
    layers = [f"{part.layers.start} to {part.layers.stop - 1}" for part in parts]
    held = [f"layers {' and '.join(layers)}"] if layers else []
    return ", ".join((f"rank {world.rank} of {world.size}", *axes, *held))


def _weights_endpoint(publisher: WeightPublisher, world: World) -> str:
    """The endpoints of all processes of the replica, which serve their weights there."""
    if world.size == 1:
        return publisher.endpoint
    said = world.exchange(join_places([Place(endpoint=publisher.endpoint, host=host_id(), rack=rack_id())]).encode())
    return join_places(place for words in said for place in split_places(words.decode(), ""))


def make_writer(job: Job, world: World) -> VersionWriter | None:
    """Stores weight versions, if the recipe says where, and somebody reads them."""
    sync = job.recipe.sync
    if sync.directory is None or not job.uses_rollouts:
        return None
    return VersionWriter(sync.directory, job.run_id, is_only=sync.transport == "disk", removes=world.is_leader)


def make_reader(job: Job, plugins: PluginSet, trainer: Trainer, payloads: PayloadClient) -> ShareReader:
    """Reads shares; the dataset is loaded where a stage learns from its rows, or once it is set to."""
    model = trainer.model
    sources = {stage.index: source_of(plugins, stage) for stage in stages(job.recipe)}
    dataset = functools.cache(lambda: load_dataset(job, plugins))
    if any(
        sources[stage.index] != "rollouts" or load_algorithm(job, plugins, stage).num_demonstrations > 0
        for stage in stages(job.recipe)
    ):
        dataset()
    return ShareReader(
        model=model,
        payloads=payloads,
        dataset=dataset,
        longest=min(model.facts().context_length, job.recipe.policy.micro_batch_units),
        world=trainer.world,
        config=job.recipe.dataset,
        paired_stages=frozenset(index for index, source in sources.items() if source == "preferences"),
        seed=job.recipe.run.seed,
        advance=trainer.activity.advance,
    )


if __name__ == "__main__":
    run_role("policy", main)
