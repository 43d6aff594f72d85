"""What of a run other machines can reach, and what protects it there."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.config.checks import is_loopback
from cosmos_core.config.job import Job
from cosmos_core.config.schema import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import LauncherCapabilities


def check_exposed(recipe: Recipe, launcher: LauncherCapabilities) -> None:
    """Refuse to start processes that other machines can reach with keys that nobody has made on purpose.

    A run that is handed over has to be reached by its own machines: it uses the keys of its folder.

    Args:
        recipe: The recipe.
        launcher: What its launcher does.

    Raises:
        ConfigError: The recipe's `control.bind` is open, its `control.keys` names none, and its processes start here.
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
