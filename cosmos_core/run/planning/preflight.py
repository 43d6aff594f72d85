"""Checks before any process starts: what engine and rewards lack, keys, devices, weights, open ports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import attrs

from cosmos_core.config.checks import is_loopback
from cosmos_core.config.job import Job
from cosmos_core.config.loading import dump_recipe
from cosmos_core.config.mesh import world_size
from cosmos_core.config.schema import LaunchConfig, Recipe
from cosmos_core.config.structure import structure
from cosmos_core.config.training import DTYPES
from cosmos_core.data.paths import VARIABLE
from cosmos_core.devices import uses_gpu, visible_gpus
from cosmos_core.errors import ConfigError, PluginBrokenError, told_as
from cosmos_core.plugins.recipe import greedy, load_rewards, sampled
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import LauncherCapabilities, Model, ModelFacts, PlannedRun, Preflight, Reward
from cosmos_core.rollout.rewards.scoring import absent_here
from cosmos_core.run.launch.launcher import capabilities_of
from cosmos_core.run.planning.parts import Parts
from cosmos_core.storage.stores import KEY, SECRET
from cosmos_core.transport.key_folder import check_folder
from cosmos_core.transport.messages import Role


def engine_preflight(
    recipe: Recipe, plugins: PluginSet, model: Model, facts: ModelFacts, *, shows_media: bool
) -> Preflight:
    """Ask the engine."""
    config = recipe.rollout
    provider = plugins.provider("engine", config.engine.plugin)
    ask: Callable[..., Any] | None = provider.preflight
    if ask is None:
        return Preflight()
    is_evaluated = recipe.evaluation.interval > 0 and recipe.evaluation.prompts > 0
    # Where nothing is trained on rollouts, evaluations alone are drawn.
    is_drawn = plugins.provider("algorithm", recipe.algorithm.plugin).capabilities.source == "rollouts"
    planned = PlannedRun(
        model=model,
        facts=facts,
        device=config.device,
        # What another machine has is not known here; its launcher's own options say, and are checked there.
        has_gpu=bool(visible_gpus()) or capabilities_of(recipe, plugins).submits,
        precision=DTYPES[config.precision],
        temperatures={"rollout.sampling.temperature": config.sampling.temperature} if is_drawn else {},
        shows_media=shows_media,
        num_ranks=world_size(config.mesh),
        sleeps=config.placement == "colocated",
        samplings={
            **({"rollout.sampling": sampled(recipe)} if is_drawn else {}),
            **({"evaluation": greedy(recipe)} if is_evaluated else {}),
        },
    )
    options: object = structure(config.engine.options, provider.options, "rollout.engine.options")
    where = f"engine plugin {config.engine.plugin!r}"
    with told_as(PluginBrokenError, f"{where}: preflight() failed"):
        told = ask(options, planned)
    if not isinstance(told, Preflight):
        raise PluginBrokenError(f"{where}: preflight() returned {told!r}, which is no Preflight")
    return told


def absent_of_rewards(recipe: Recipe, plugins: PluginSet, rewards: Sequence[Reward]) -> tuple[str, ...]:
    """Ask the rewards; none where the launcher submits, since what those machines have is not known here."""
    return () if capabilities_of(recipe, plugins).submits else absent_here(recipe.reward, rewards)


def absent_gpus(recipe: Recipe, plugins: PluginSet) -> tuple[str, ...]:
    """GPUs that torch does not see, in words; none where the launcher submits, or every device is the CPU."""
    if not capabilities_of(recipe, plugins).submits:
        try:
            for pool in ("policy", "rollout"):
                uses_gpu(f"{pool}.device", getattr(recipe, pool).device)
        except ConfigError as error:
            return (str(error),)
    return ()


def unset_variables(job: Job, plugins: PluginSet, given: Collection[str]) -> dict[str, Sequence[str]]:
    """Environment variables that a run needs and that are not among those given, by what reads them."""
    found: dict[str, Sequence[str]] = {}
    for config, reward in zip(job.recipe.reward, load_rewards(job, plugins), strict=True):
        if hasattr(reward, "unset_variables"):
            found[f"reward {config.label}"] = reward.unset_variables(given)
    text = dump_recipe(attrs.evolve(job.recipe, launch=LaunchConfig()))
    read = {match["name"] for match in VARIABLE.finditer(text) if match["default"] is None}
    found["paths of the recipe"] = sorted(read.difference(given))
    if "s3://" in text and not any(name.startswith("AWS_") for name in given):
        found["s3://"] = [name for name in (KEY, SECRET) if name not in given]
    return {who: names for who, names in found.items() if names}


def check_keys(job: Job) -> None:
    """Refuse a run that nobody could connect to: its recipe names keys that are not there, damaged, or not secret."""
    if job.recipe.control.keys is None:
        return
    try:
        check_folder(job.keys)
    except ConfigError as error:
        raise ConfigError(f"control.keys: {error}") from error


def check_gpus(recipe: Recipe, joins: Role | None = None) -> None:
    """Refuse to start processes of one NCCL group that would have to share a GPU, which it cannot.

    A plan may be made where the GPUs are not; a run may not. Of the role that `joins`, one replica is started, alone.
    """
    found, policy, rollout = len(visible_gpus()), recipe.policy, recipe.rollout
    if joins is not None:
        policy = attrs.evolve(policy, replicas=1)
    sizes = f"{policy.replicas} · {world_size(policy.mesh)}" if policy.replicas > 1 else f"{world_size(policy.mesh)}"
    for key, device, number, told in (
        ("policy.mesh", policy.device, policy.replicas * world_size(policy.mesh), sizes),
        ("rollout.mesh", rollout.device, world_size(rollout.mesh), f"{world_size(rollout.mesh)}"),
    ):
        if joins not in (None, key.removesuffix(".mesh")):
            continue
        if device != "cpu" and 0 < found < number:
            raise ConfigError(
                f"{key}: {told} processes of its replicas need a GPU each, and this machine has {found}; use a smaller "
                f"mesh or fewer replicas, or {key.removesuffix('mesh')}device = 'cpu'"
            )


def check_hooks(recipe: Recipe, plugins: PluginSet) -> None:
    """Refuse hooks, or options of theirs, with which a session could not begin."""
    for name in recipe.tracking.hooks:
        options = recipe.tracking.options.get(name, {})
        structure(options, plugins.provider("hook", name).options, f"tracking.options.{name}")
        plugins.check_hook(name)


def check_present(parts: Parts) -> None:
    """Refuse to start processes that would find no weights, or an engine or a reward that cannot work here.

    A plan may be made where these are not; a run may not.
    """
    models = (parts.facts, *(frozen.facts for frozen in parts.frozen.values()))
    told = (*(each.absent_weights for each in models), parts.preflight.absent, *parts.absent)
    if lacking := [what for what in told if what]:
        raise ConfigError("\n".join(lacking))


def check_exposed(recipe: Recipe, launcher: LauncherCapabilities) -> None:
    """Refuse to start processes that other machines can reach with keys that nobody has made on purpose.

    A run that is handed over has to be reached by its own machines: it uses the keys of its folder.
    """
    control = recipe.control
    if control.keys is None and not launcher.submits and not is_loopback(control.bind):
        raise ConfigError(
            f"control.bind: other machines can reach {control.bind}, and control.keys names no keys; make some with "
            f'`cosmos keys new keys`, then --set control.keys="{Path("keys").absolute()}" (relative paths start at the '
            "recipe's folder), or leave control.bind at 127.0.0.1"
        )


def exposure(job: Job) -> str:
    """For people; empty where only this machine can reach the run."""
    recipe = job.recipe
    if is_loopback(recipe.control.bind):
        return ""
    open_ways = ["gradients between the processes of policy replicas"]
    if recipe.sync.transport in ("gloo", "nccl"):
        open_ways.append(f"weights (sync.transport {recipe.sync.transport!r})")
    return (
        f"Other machines can reach {recipe.control.bind} (control.bind). Control, samples and weights over ZeroMQ are "
        f"encrypted, for holders of keys that {job.keys / 'allowed.toml'} allows. Not encrypted, nor asked for keys: "
        f"{' and '.join(open_ways)}, over gloo or NCCL. Use a network of which you trust every machine"
    )
