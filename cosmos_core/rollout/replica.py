"""A rollout replica's life: build everything, join, then keep to the controller's directives until told to stop."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import attrs
import torch

from cosmos_core.config.job import Job, stages
from cosmos_core.config.schema import Recipe
from cosmos_core.config.training import DTYPES
from cosmos_core.devices import choose_device, num_threads, stay_near
from cosmos_core.plugins.recipe import load_algorithm, load_dataset, load_model, selections
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import (
    Algorithm,
    EngineCapabilities,
    EngineContext,
    EnvironmentCapabilities,
    Model,
    RolloutEngine,
)
from cosmos_core.protocols.engine import SleepingEngine
from cosmos_core.protocols.model import SleepingModel
from cosmos_core.replica.activity import Pulse
from cosmos_core.replica.client import ControlClient
from cosmos_core.replica.process import RoleArgs
from cosmos_core.replica.profiler import Profiler
from cosmos_core.replica.turns import Turns, role_lock
from cosmos_core.replica.utilisation import memory
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.rollout.generation import Generation, GenerationParts, LeaseRecipes
from cosmos_core.rollout.media import MediaWriter
from cosmos_core.rollout.relay import Relay
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.rollout.samples import schema
from cosmos_core.rollout.serving.engine import ServedEngine
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.rollout.weights_sync import WeightSync
from cosmos_core.storage.parts import FOLDER, PartWriter
from cosmos_core.transport.addresses import host_id, rack_id
from cosmos_core.transport.directives import RolloutDirective
from cosmos_core.transport.payloads import PayloadServer
from cosmos_core.transport.reports import Left, Report, Slept, Troubled
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import torch_dtype
from cosmos_core.weights.snapshot import Base

_LOG: Final = logging.getLogger(__name__)

_TICK_S: Final = 0.2
_RATE_WINDOW_S: Final = 5.0
_FLUSH_S: Final = 10.0
_UNTRACED: Final = "the processes of its engine (rollout.mesh.tp), which compute, are not traced"


def main(args: RoleArgs) -> None:
    """Serve until a directive says stop.

    Raises:
        CosmosError: The replica cannot be set up or cannot go on.
    """
    torch.set_num_threads(num_threads(args.job.recipe.launch.threads))
    with contextlib.ExitStack() as stack:
        replica = Replica(args, stack)
        replica.serve()


def make_engine(job: Job, plugins: PluginSet, model: Model, replica: str) -> RolloutEngine:
    """The recipe's engine, not started, of a replica of this name and incarnation."""
    config = job.recipe.rollout
    device = choose_device("rollout.device", config.device)
    if config.mesh.tp == 1:
        stay_near(device)
    context = EngineContext(
        model=model,
        dtype=torch_dtype(DTYPES[config.precision]),
        device=device,
        max_in_flight=config.max_in_flight,
        context_length=model.facts().context_length,
        seed=job.recipe.run.seed,
        replica=replica,
        quantization=config.quantization,
        tensor_parallel=config.mesh.tp,
        sleeps=config.placement == "colocated",
        dialogues=job.recipe.has_dialogues,
    )
    engine = plugins.create("engine", config.engine.plugin, config.engine.options, context, "rollout.engine.options")
    return cast("RolloutEngine", engine)


def _started_pools(
    recipe: Recipe, stack: contextlib.ExitStack, tell: Callable[[Troubled], None]
) -> tuple[RewardPool, EnvironmentPool | None]:
    """The processes of rewards, and those of the environment if the recipe has one; `stack` ends them."""
    rewards = RewardPool(recipe.reward, num_workers=recipe.rollout.reward_workers, seed=recipe.run.seed)
    rewards.tell = tell
    stack.callback(rewards.close)
    rewards.start()
    if recipe.environment is None:
        return rewards, None
    environments = EnvironmentPool(recipe.environment, seed=recipe.run.seed)
    stack.callback(environments.close)
    environments.start()
    return rewards, environments


class Replica:
    """The parts of one replica; `stack` ends them in reverse order."""

    def __init__(self, args: RoleArgs, stack: contextlib.ExitStack) -> None:
        job, recipe = args.job, args.job.recipe
        self._stop = args.stop
        self._troubles = deque[Troubled]()
        # The workers import their plugins while the model is built.
        pool, environments = _started_pools(recipe, stack, self._troubles.append)
        plugins = PluginSet.load(selections(recipe, ("model", "algorithm", "dataset", "engine", "environment")))
        model, stage = load_model(job, plugins), stages(recipe)[-1]
        self._engine = make_engine(job, plugins, model, f"{args.name} {args.incarnation}")
        untraced = _UNTRACED if recipe.rollout.mesh.tp > 1 else ""
        self._profiler = Profiler(job.directory, args.name, self._report, untraced=untraced)
        if isinstance(self._engine, ServedEngine):
            self._engine.profiler = self._profiler
        payloads = stack.enter_context(PayloadServer(args.address, args.keyring))
        version_lock = VersionLock()

        def algorithm(changed: Recipe) -> Algorithm:
            return load_algorithm(attrs.evolve(job, recipe=changed), plugins, stages(changed)[stage.index])

        engine: EngineCapabilities = plugins.provider("engine", recipe.rollout.engine.plugin).capabilities
        self._sync = self._weight_sync(args, engine, version_lock, stack)
        stack.callback(self._engine.shutdown)
        self._turns = self._started(args, engine, model, stack)
        environment = EnvironmentCapabilities()
        if recipe.environment is not None:
            environment = plugins.provider("environment", recipe.environment.plugin).capabilities
        parts = GenerationParts(
            recipe=recipe,
            stage=stage.index,
            context_length=model.facts().context_length,
            model=model,
            dataset=load_dataset(job, plugins),
            recipes=LeaseRecipes(recipe, algorithm),
            engine=self._engine,
            pool=pool,
            payloads=payloads,
            version_lock=version_lock,
            report=self._report,
            samples=self._sample_writer(args),
            media_writer=MediaWriter(job.directory) if engine.renders else None,
            takes_media=engine.media,
            environments=environments,
            environment=environment,
        )
        self._generation = Generation(parts)
        self._checks: tuple[Callable[[], None], ...] = (
            self._engine.health,
            pool.check,
            self._sync.check,
            self._generation.check,
            *(() if environments is None else (environments.check,)),
        )
        metrics = ReplicaMetrics(parts, self._sync, self._generation, self._turns)
        self._client: ControlClient = args.connect(
            endpoints={"payloads": payloads.endpoint}, gauges=metrics.gauges, take_pulse=metrics.pulse
        )
        for part in (self._sync, self._generation):
            part.start()
            stack.callback(part.close)

    def _sample_writer(self, args: RoleArgs) -> PartWriter | None:
        size = args.job.recipe.samples.max_bytes
        if not size:
            return None
        writer = PartWriter(args.job.directory / FOLDER, "samples", args.name, schema, size)
        writer.tell = self._not_written
        return writer

    def _weight_sync(
        self, args: RoleArgs, engine: EngineCapabilities, version_lock: VersionLock, stack: contextlib.ExitStack
    ) -> WeightSync:
        job = args.job
        sync = job.recipe.sync
        receiver = WeightReceiver(
            sync.transport,
            run_id=job.run_id,
            host=host_id(),
            rack=rack_id(),
            directory=sync.directory,
            keyring=args.keyring,
            name=args.name,
        )
        return WeightSync(
            self._engine,
            stack.enter_context(receiver),
            version_lock,
            cache=sync.cache,
            in_flight_update=engine.in_flight_update,
            report=self._report,
            relay=stack.enter_context(Relay(job.run_id, args.address, keyring=args.keyring)),
            relay_timeout_s=sync.relay_timeout_s,
            base=stack.enter_context(Base()) if sync.delta else None,
        )

    def _started(
        self, args: RoleArgs, engine: EngineCapabilities, model: Model, stack: contextlib.ExitStack
    ) -> Turns | None:
        """Start the engine; its turns, asleep, if it shares its GPUs."""
        lock, sleeper = stack.enter_context(role_lock(args)), cast("SleepingEngine", self._engine)
        sleeper.start()
        if lock is None:
            return None
        assert engine.sleeps, "engines that cannot sleep are refused when a run is planned"

        def sleep() -> None:
            self._sync.rest()
            sleeper.pause("keep" if engine.in_flight_update else "wait")
            if isinstance(model, SleepingModel):
                model.sleep()
            # It gives back what either has freed.
            sleeper.sleep()

        def wake() -> None:
            sleeper.wake()
            if isinstance(model, SleepingModel):
                model.wake()
            self._sync.rise()

        return Turns(lock, sleep=sleep, wake=wake)

    def _report(self, report: Report) -> None:
        self._client.report(report)

    def _not_written(self, number: int, why: str) -> None:
        self._troubles.append(Troubled(what="samples that could not be written", number=number, last=why))

    def _tell_troubles(self) -> None:
        """Report all that went wrong since the last call, each thing once."""
        found: dict[str, Troubled] = {}
        while self._troubles:
            new = self._troubles.popleft()
            known = found.get(new.what)
            found[new.what] = attrs.evolve(new, number=new.number + (known.number if known else 0))
        for each in found.values():
            self._report(each)

    def serve(self) -> None:
        """Follow directives until one says stop or leave, or the process is told to end.

        Raises:
            CosmosError: A part failed, or the controller refused this replica.
        """
        revision = 0
        wanted: RolloutDirective | None = None
        while not self._stop.is_set():
            for check in self._checks:
                check()
            self._tell_troubles()
            directive = self._client.wait_directive(revision, _TICK_S)
            if directive is not None and directive.rollout is not None:
                revision, wanted = directive.revision, directive.rollout
            if wanted is None:
                continue
            if wanted.stop or wanted.leave:
                break
            self._reconcile(wanted)
        if isinstance(self._engine, ServedEngine):
            self._engine.end_profile()
        self._generation.close()
        self._tell_troubles()
        if wanted is not None and wanted.leave and not wanted.stop:
            _LOG.info("leaving the run, as the controller says")
            self._report(Left())
        if not self._client.flush(_FLUSH_S):
            _LOG.warning("the controller did not confirm the last reports within %g s", _FLUSH_S)

    def _reconcile(self, wanted: RolloutDirective) -> None:
        self._profiler.order = wanted.profile
        if not isinstance(self._engine, ServedEngine):
            self._profiler.finish("its engine has no steps of its own that could be traced")
        if self._turns is not None and self._turns.follow(wanted.turn, sleep=wanted.sleep):
            self._report(Slept(turn=wanted.turn))
        self._sync.aim(wanted.weights, wanted.relaying, wanted.rollbacks)
        self._generation.reconcile(wanted.leases, wanted.hold)


@attrs.define(eq=False)
class ReplicaMetrics:
    """Reads gauges and progress of all parts; called on the control client's thread."""

    _parts: GenerationParts
    _sync: WeightSync
    _generation: Generation
    _turns: Turns | None
    _recent: deque[tuple[float, int]] = attrs.field(factory=deque, init=False)

    def gauges(self) -> dict[str, float]:
        """Name to value."""
        stats = self._parts.engine.stats()
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "generated_units": stats.generated_units,
            "prompt_units": stats.prompt_units,
            "cached_units": stats.cached_units,
            "evicted_units": stats.evicted_units,
            "preempted": stats.preempted,
            "units_per_s": self._rate(stats.generated_units),
            "busy_s": stats.busy_s,
            "paused_s": stats.paused_s,
            "scoring_s": self._parts.pool.scoring_s,
            "weight_version": self._parts.version_lock.loaded,
            "transfer_s": self._sync.transfer_s,
            "held": len(self._parts.payloads.held),
            **self._generation.counts,
            # Of what an engine's own processes take, this one is not told.
            **(memory() if self._parts.recipe.rollout.mesh.tp == 1 else {}),
            **({} if self._turns is None else self._turns.gauges()),
        }

    def pulse(self) -> Pulse:
        """Progress, and what the replica is doing."""
        stats, loading, active = self._parts.engine.stats(), self._sync.loading, self._generation.num_active
        is_asleep = self._turns is not None and self._turns.is_asleep
        doing = f"working on {active} prompts" if active and not is_asleep else ""
        if loading >= 0:
            doing = f"loading weights version {loading}"
        units = stats.generated_units + stats.prompt_units
        scoring_ms = round(1000 * self._parts.pool.scoring_s)
        return Pulse(progress=units + self._sync.num_pieces + self._generation.num_ended + scoring_ms, doing=doing)

    def _rate(self, generated: int) -> float:
        """Units a second over the last seconds."""
        now = time.monotonic()
        self._recent.append((now, generated))
        while len(self._recent) > 2 and now - self._recent[1][0] >= _RATE_WINDOW_S:
            self._recent.popleft()
        since, before = self._recent[0]
        return (generated - before) / (now - since) if now > since else 0.0
