"""`python -m cosmos_core.policy`: the process of a policy replica."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cosmos_core.config.job import Job
from cosmos_core.config.stages import stages
from cosmos_core.plugin.roles import load_algorithm, load_dataset, load_model, selections, source_of
from cosmos_core.plugin.selection import PluginSet
from cosmos_core.policy.device import choose_device
from cosmos_core.policy.group import GroupStore
from cosmos_core.policy.publication import DTYPES, Publications
from cosmos_core.policy.replica import Parts, PolicyReplica, UnitRate
from cosmos_core.policy.restoring import restore
from cosmos_core.policy.saving import CheckpointSaver
from cosmos_core.policy.share import ShareReader
from cosmos_core.policy.step import StepRunner
from cosmos_core.policy.trainer import Trainer
from cosmos_core.protocols import Model
from cosmos_core.replica.process import RoleArgs, run_role
from cosmos_core.transport.payloads import PayloadClient
from cosmos_core.weights.publisher import WeightPublisher

FLUSH_S = 10.0


def main(args: RoleArgs) -> None:
    """Train until the controller says stop."""
    job, recipe = args.job, args.job.recipe
    torch.set_num_threads(recipe.launch.threads)
    torch.manual_seed(recipe.run.seed)
    plugins = PluginSet.load(selections(recipe, ("model", "algorithm", "dataset")))
    model = load_model(job, plugins)
    trainer = make_trainer(job, model)
    begin_stage = stage_starter(job, plugins, trainer)
    begin_stage(0)
    if args.checkpoint is not None:
        restore(trainer, args.checkpoint, begin_stage)
    store = GroupStore(recipe.control.bind)
    with WeightPublisher(job.run_id, recipe.control.bind) as publisher, PayloadClient() as payloads:
        client = args.connect(
            endpoints={"weights": publisher.endpoint, "store": store.endpoint},
            step=trainer.step,
            gauges=UnitRate(trainer),
        )
        parts = Parts(
            name=args.name,
            run_id=job.run_id,
            host=store.host,
            client=client,
            trainer=trainer,
            runner=StepRunner(trainer=trainer, reader=make_reader(job, plugins, model, payloads)),
            publications=Publications(publisher, DTYPES[recipe.rollout.precision], client.report),
            saver=CheckpointSaver(job.checkpoints, recipe.policy.checkpoint.keep, client.report),
            begin_stage=begin_stage,
            stop=args.stop,
        )
        PolicyReplica(parts).run()
        client.flush(FLUSH_S)


def make_trainer(job: Job, model: Model) -> Trainer:
    """The initial weights of a job, ready to train."""
    policy = job.recipe.policy
    device = choose_device(policy.device)
    module = model.build(seed=job.recipe.run.seed, dtype=torch.float32, device=device)
    return Trainer(model=model, module=module, policy=policy, device=device)


def stage_starter(job: Job, plugins: PluginSet, trainer: Trainer) -> Callable[[int], None]:
    """A function that makes the trainer take up a stage, by index."""

    def begin(index: int) -> None:
        stage = stages(job.recipe)[index]
        is_rollouts = source_of(plugins, stage) == "rollouts"
        temperature = job.recipe.rollout.sampling.temperature if is_rollouts else 1.0
        trainer.begin_stage(stage, load_algorithm(job, plugins, stage), temperature)

    return begin


def make_reader(job: Job, plugins: PluginSet, model: Model, payloads: PayloadClient) -> ShareReader:
    """Reads shares; the dataset is loaded only where a stage learns from demonstrations."""
    imitates = any(source_of(plugins, stage) == "demonstrations" for stage in stages(job.recipe))
    dataset = load_dataset(job, plugins) if imitates else None
    return ShareReader(
        model=model,
        payloads=payloads,
        dataset=dataset,
        longest=min(model.facts().context_length, job.recipe.policy.micro_batch_units),
    )


if __name__ == "__main__":
    run_role("policy", main)
