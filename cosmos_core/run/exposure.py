"""What of a run other machines can reach, and what protects it there."""

from __future__ import annotations

from cosmos_core.config.checks import is_loopback
from cosmos_core.config.job import Job


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
