"""`python -m cosmos_launcher_slurm.task GPUS FIRST MODULE ARGUMENTS...`: one task of a replica's step.

It finds out from Slurm which of the replica's processes it is, which GPUs of the node are its own and where the node
stands, and becomes that process. All processes of a replica see the same devices of Slurm, so that those of a node can
reach each other's memory; each uses its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from cosmos_core.run.launch import RACK

_GPUS: Final = "CUDA_VISIBLE_DEVICES"


def arguments_of(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command line of this task's process.

    Args:
        arguments: Of the replica's first process, with `--name`.
        environment: Of the task, from Slurm.
    """
    rank = int(environment["SLURM_PROCID"])
    if rank == 0:
        return list(arguments)
    name = arguments[arguments.index("--name") + 1]
    # The last one counts.
    return [*arguments, "--name", f"{name}.{rank}", "--rank", str(rank)]


def variables_of(num_gpus: int, first: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of this task's process: its GPUs, and the label of its rack.

    Args:
        num_gpus: GPUs of each process; 0 hides all.
        first: Of those that the step sees on a node, which are its replica's: from this one on.
        environment: Of the task, from Slurm.
    """
    visible = [gpu for gpu in environment.get(_GPUS, "").split(",") if gpu]
    own = first + int(environment["SLURM_LOCALID"]) * num_gpus
    variables = {_GPUS: ",".join(visible[own : own + num_gpus])}
    # Switches from the top down to the node, such as s0.s3.n17; without a topology, the node alone.
    switches = environment.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    if switches and not environment.get(RACK):
        variables[RACK] = switches
    return variables


def main(arguments: Sequence[str]) -> None:
    """Become the process."""
    num_gpus, first, module, *rest = arguments
    os.environ.update(variables_of(int(num_gpus), int(first), os.environ))
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments_of(rest, os.environ)])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
