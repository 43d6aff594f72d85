"""Checks across keys of a recipe that need no plugin. They reject, they never rewrite."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator

import attrs

from cosmos_core.config.mesh import world_size
from cosmos_core.config.problems import suggestion
from cosmos_core.config.schema import MeshConfig, PolicyConfig, Recipe, SyncConfig
from cosmos_core.errors import ConfigError


def check_recipe(recipe: Recipe) -> None:
    """Check what a single key's validator cannot see; a ConfigError lists every contradiction."""
    problems = [
        *_model(recipe),
        *_rewards(recipe),
        *_frozen(recipe),
        *_transport(recipe),
        *_meshes(recipe),
        *_offload(recipe.policy),
        *_rest(recipe),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def is_loopback(bind: str) -> bool:
    """True if only this machine reaches what listens at an address."""
    try:
        return ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return bind == "localhost"


def staleness_bound(sync: SyncConfig) -> int:
    """Steps that a sample may lag the weights it trains: `max_staleness`, and 0 in sync mode."""
    return 0 if sync.mode == "sync" else sync.max_staleness


def superseded(steps: Iterable[int], keep: int, best: int | None) -> list[int]:
    """Checkpoints that are not kept any more, by their steps, oldest first: all but the `keep` newest and the best."""
    return [step for step in sorted(steps)[:-keep] if step != best]


def pace_problem(interval: int, bound: int) -> str:
    """Say why weights cannot be published every `interval` steps where samples may lag `bound`; empty if they can."""
    if interval - 1 <= bound:
        return ""
    return (
        f"sync.interval: weights published every {interval} steps lag up to {interval - 1}, more than "
        f"the {bound} that sync.max_staleness and sync.mode allow; lower sync.interval or allow more staleness"
    )


def _model(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.path is not None and model.config is not None:
        yield f"model.path: given ({model.path}) besides model.config; a checkpoint has its own config, remove one"
    if model.path is None and model.config is None:
        yield (
            "model.path: neither model.path nor model.config is given; name a checkpoint "
            "(--set model.path=FOLDER), or give a config for a model from random weights"
        )


def _frozen(recipe: Recipe) -> Iterator[str]:
    for role, config in recipe.frozen.items():
        if config.path is not None and not config.path.strip():
            yield f"{role}.path: empty; name a checkpoint{', or leave it out' if role == 'reference' else ''}"
    reference = recipe.reference
    if reference is not None and reference.path is None and reference.plugin not in {None, recipe.model.plugin}:
        yield (
            f"reference.plugin: {reference.plugin!r}, but a reference without a path has the policy's own weights, "
            f"which are of {recipe.model.plugin!r}; leave it out, or give reference.path a checkpoint"
        )
    if recipe.teacher is not None and recipe.teacher.path is None:
        yield "teacher.path: not given; a teacher without a checkpoint would be the policy itself: name one"


def _rewards(recipe: Recipe) -> Iterator[str]:
    if recipe.environment is not None and recipe.environment.label in {reward.label for reward in recipe.reward}:
        yield (
            f"environment.plugin: {recipe.environment.plugin} is the name of a reward, too, and both are reported by "
            "name; write one of them as DISTRIBUTION:NAME"
        )
    labels = [reward.label for reward in recipe.reward]
    for label, count in Counter(labels).items():
        if count > 1:
            yield (
                f"reward: {label} is listed {count} times; rewards are reported by name, give each one of its own: "
                f'name = "…" in its [[reward]], or --set reward.{labels.index(label)}.name=…'
            )


def _transport(recipe: Recipe) -> Iterator[str]:
    sync = recipe.sync
    if problem := pace_problem(sync.interval, staleness_bound(sync)):
        yield problem
    if sync.transport == "disk" and sync.directory is None:
        yield "sync.directory: not given, and sync.transport 'disk' stores versions there; set a path or an s3:// URL"
    if sync.directory is not None and sync.transport not in {"auto", "disk"}:
        yield (
            f"sync.directory: given ({sync.directory}), but sync.transport {sync.transport!r} never reads it; "
            "remove it, or set sync.transport to 'auto' or 'disk'"
        )
    if sync.delta and sync.transport not in {"auto", "zmq"}:
        yield (
            f"sync.delta: true, but with sync.transport {sync.transport!r} weights come whole; "
            "set sync.transport to 'zmq' or 'auto', or remove sync.delta"
        )
    for pool, device in (("policy", recipe.policy.device), ("rollout", recipe.rollout.device)):
        if sync.transport == "nccl" and device == "cpu":
            yield (
                f"sync.transport: 'nccl' sends from GPU to GPU, and {pool}.device is 'cpu'; "
                "set sync.transport to 'gloo' or 'auto'"
            )


def _meshes(recipe: Recipe) -> Iterator[str]:
    for field in attrs.fields(MeshConfig):
        size = getattr(recipe.rollout.mesh, field.name)
        if size != 1 and field.name != "tp":
            yield (
                f"rollout.mesh.{field.name}: must be 1, got {size}; the processes of a rollout replica share layers "
                "(tp) and nothing else, use rollout.replicas to spread the work"
            )
    sizes = [("policy.prompts_per_step", recipe.policy.prompts_per_step)]
    if recipe.warmup is not None:
        sizes.append(("warmup.prompts_per_step", recipe.warmup.prompts_per_step))
    for path, size in sizes:
        if size < recipe.policy.replicas:
            yield (
                f"{path}: {size} prompts cannot be shared among policy.replicas = {recipe.policy.replicas}; "
                "each replica needs at least one"
            )


def _offload(policy: PolicyConfig) -> Iterator[str]:
    if policy.parallel.offload_activations and policy.parallel.recompute == "selective":
        yield (
            "policy.parallel.offload_activations: results that 'selective' keeps stay on the device; set "
            "policy.parallel.recompute to 'none' or 'full'"
        )
    if not policy.parallel.cpu_offload:
        return
    if policy.device == "cpu":
        yield "policy.parallel.cpu_offload: weights are in CPU memory already with policy.device = 'cpu'; remove it"
    if world_size(policy.mesh) == 1:
        yield (
            "policy.parallel.cpu_offload: it is FSDP's, and policy.mesh makes a replica of one process; "
            "raise policy.mesh.dp_shard, or remove it"
        )


def _rest(recipe: Recipe) -> Iterator[str]:
    control = recipe.control
    if control.lost_after_s <= control.heartbeat_s:
        yield (
            f"control.lost_after_s: {control.lost_after_s} s is not longer than control.heartbeat_s = "
            f"{control.heartbeat_s} s, so every replica would be lost; a few heartbeats are needed"
        )
    hooks = recipe.tracking.hooks
    for name in recipe.tracking.options:
        if name not in hooks:
            yield f"tracking.options.{name}: no such hook in tracking.hooks; {suggestion(name, hooks)}"
    for name, count in Counter(hooks).items():
        if count > 1:
            yield f"tracking.hooks: {name} is listed {count} times"
