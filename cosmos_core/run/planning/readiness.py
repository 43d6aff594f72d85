"""What a machine must have for a run: keys, devices, weights, and what engine and rewards need."""

from __future__ import annotations

from cosmos_core.config.job import Job
from cosmos_core.config.mesh import world_size
from cosmos_core.config.schema import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.run.launch.local import visible_gpus
from cosmos_core.run.launch.making import capabilities_of
from cosmos_core.run.planning.parts import Parts
from cosmos_core.transport.keys.folder import check_folder


def check_keys(job: Job) -> None:
    """Refuse a run whose door would not open: its recipe names keys that are not there, damaged, or not secret.

    Raises:
        ConfigError: What is wrong with them.
    """
    if job.recipe.control.keys is None:
        return
    try:
        check_folder(job.keys)
    except ConfigError as error:
        raise ConfigError(f"control.keys: {error}") from error


def check_devices(recipe: Recipe, plugins: PluginSet) -> None:
    """Refuse devices that this machine lacks, where the run's processes are started on it.

    Raises:
        ConfigError: There is no CUDA device, or fewer than the policy has processes.
    """
    wanting = [f"{pool}.device" for pool in ("policy", "rollout") if getattr(recipe, pool).device == "cuda"]
    if not wanting or capabilities_of(recipe, plugins).submits:
        return
    import torch  # noqa: PLC0415 - the model plugin imports it anyway, later

    if not torch.cuda.is_available():
        raise ConfigError(f'{", ".join(wanting)}: "cuda", but torch sees no CUDA device; set "auto" or "cpu"')
    found = len(visible_gpus())
    each = world_size(recipe.policy.mesh)
    if recipe.policy.device == "cuda" and recipe.policy.replicas * each > found:
        sizes = f" · {each} processes of policy.mesh" if each > 1 else ""
        raise ConfigError(
            f"policy.replicas: {recipe.policy.replicas} replicas{sizes} need a GPU for each process, and this machine "
            f"has {found}"
        )


def check_gpus(recipe: Recipe) -> None:
    """Refuse to start replicas whose processes would have to share a GPU, which NCCL cannot.

    A plan may be made where the GPUs are not; a run may not.

    Raises:
        ConfigError: This machine has GPUs, and fewer than a replica has processes.
    """
    found = len(visible_gpus())
    for pool, config in (("policy", recipe.policy), ("rollout", recipe.rollout)):
        each = world_size(config.mesh)
        if config.device != "cpu" and 0 < found < each:
            raise ConfigError(
                f"{pool}.mesh: {each} processes of a replica need a GPU each, and this machine has {found}; use a "
                f"smaller mesh, or {pool}.device = 'cpu'"
            )


def check_present(parts: Parts) -> None:
    """Refuse to start processes that would find no weights, or an engine or a reward that cannot work here.

    A plan may be made where these are not; a run may not.

    Raises:
        ConfigError: The model's checkpoint has no weights here, or the engine or a reward lacks something.
    """
    models = (parts.facts, *(frozen.facts for frozen in parts.frozen.values()))
    told = (*(each.absent_weights for each in models), parts.foresight.absent, *parts.absent)
    if lacking := [what for what in told if what]:
        raise ConfigError("\n".join(lacking))
