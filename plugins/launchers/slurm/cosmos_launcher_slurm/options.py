"""The settings of the cluster in a recipe: the `launch.options` of the Slurm launcher."""

from __future__ import annotations

import sys
from typing import Final

import attrs
from attrs import validators as check

from cosmos_core.errors import ConfigError

_POSITIVE: Final = check.gt(0)


def _one_word(_instance: object, _attribute: attrs.Attribute[str | None], value: str | None) -> None:
    if value is not None and (not value or any(not each.isprintable() or each.isspace() for each in value)):
        raise ValueError(f"expected a word without white space, got {value!r}")


@attrs.frozen(kw_only=True)
class SlurmOptions:
    """`launch.options` of the launcher `slurm`."""

    partition: str | None = attrs.field(
        default=None, validator=_one_word, metadata={"help": "Partition; the cluster's default if absent."}
    )
    account: str | None = attrs.field(
        default=None, validator=_one_word, metadata={"help": "Account that is charged; the user's default if absent."}
    )
    qos: str | None = attrs.field(
        default=None, validator=_one_word, metadata={"help": "Quality of service; the default if absent."}
    )
    time: str | None = attrs.field(
        default=None,
        validator=_one_word,
        metadata={"help": "Time limit, such as 30 (minutes), 12:00:00 or 2-00:00:00; the partition's if absent."},
    )
    gpus_per_node: int = attrs.field(
        default=0, validator=check.ge(0), metadata={"help": "GPUs of each node; 0 runs everything on CPUs."}
    )
    gpu_type: str | None = attrs.field(
        default=None, validator=_one_word, metadata={"help": "Type of GPU, as the cluster names it; any if absent."}
    )
    cpus_per_node: int | None = attrs.field(
        default=None,
        validator=check.optional(_POSITIVE),
        metadata={"help": "CPUs of each node, of which a process gets its share by GPUs."},
    )
    cpus_per_process: int | None = attrs.field(
        default=None,
        validator=check.optional(_POSITIVE),
        metadata={"help": "CPUs of each process; `launch.threads`, and one for each of its workers, if absent."},
    )
    controller_cpus: int = attrs.field(
        default=2, validator=_POSITIVE, metadata={"help": "CPUs of the controller and the supervisor, which need none."}
    )
    memory_per_cpu: str | None = attrs.field(
        default=None,
        validator=_one_word,
        metadata={"help": "Memory per CPU, such as 4G; the cluster's default if absent."},
    )
    stop_before_s: int = attrs.field(
        default=120,
        validator=_POSITIVE,
        metadata={"help": "Seconds before the time limit at which the run stops, with a checkpoint, and is requeued."},
    )
    sbatch: tuple[str, ...] = attrs.field(
        default=(), metadata={"help": "Further options of sbatch, for every component, such as `--constraint=h100`."}
    )
    setup: tuple[str, ...] = attrs.field(
        default=(), metadata={"help": "Lines of shell before the run starts, such as `module load cuda`."}
    )
    python: str = attrs.field(
        default=sys.executable, metadata={"help": "Python interpreter on the nodes; this one if absent."}
    )

    def __attrs_post_init__(self) -> None:
        """Refuse lines that would be something else in a script.

        Raises:
            ConfigError: One of `sbatch` is no option, or has a line break.
        """
        for line in self.sbatch:
            if not line.startswith("-") or "\n" in line:
                raise ConfigError(
                    f"launch.options.sbatch: {line!r} is no option of sbatch; give each as one, --name=value"
                )
        if not self.python.strip() or "\n" in self.python:
            raise ConfigError(f"launch.options.python: {self.python!r} is no path of an interpreter")
