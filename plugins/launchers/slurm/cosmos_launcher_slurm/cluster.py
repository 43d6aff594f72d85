"""The resources of a cluster's nodes, as sinfo tells."""

from __future__ import annotations

import re
import subprocess
from typing import Final

import attrs

from cosmos_core.errors import ConfigError

_ASK_S: Final = 30.0
_GPUS: Final = re.compile(r"\bgpu:(?:[^:,()]+:)?(\d+)")


@attrs.frozen(kw_only=True)
class Node:
    """The most that a node of a partition has of each."""

    partition: str
    cpus: int
    gpus: int


def largest_node(partition: str | None) -> Node:
    """Ask Slurm for the nodes of a partition, or of the default one.

    Raises:
        ConfigError: It does not answer, or has no such partition.
    """
    # Of one partition alone, that there is none would look like one without nodes.
    command = ["sinfo", "--all", "--noheader", "--format=%P %c %G"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"launch.launcher: 'slurm', but the cluster cannot be asked for its nodes: {error}"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"launch.launcher: 'slurm', but sinfo does not tell its nodes: {done.stderr.strip() or 'no word why'}"
        )
    return largest(done.stdout, partition)


def largest(answer: str, partition: str | None) -> Node:
    """The largest node of an answer of sinfo: lines of partition (the default one with an asterisk), CPUs and GRES.

    Raises:
        ConfigError: The answer has no node of the partition.
    """
    rows = [line.split() for line in answer.splitlines() if len(line.split()) == 3]
    ours = [row for row in rows if (row[0].rstrip("*") == partition if partition else row[0].endswith("*"))]
    if not ours:
        known = sorted({row[0].rstrip("*") for row in rows})
        what = f"no partition {partition!r}" if partition else "no default partition; choose one"
        raise ConfigError(f"launch.options.partition: the cluster has {what}; it has {', '.join(known) or 'none'}")
    return Node(
        partition=f"partition {ours[0][0].rstrip('*')}",
        cpus=max(int(row[1].rstrip("+")) for row in ours),
        gpus=max(sum(int(number) for number in _GPUS.findall(row[2])) for row in ours),
    )
