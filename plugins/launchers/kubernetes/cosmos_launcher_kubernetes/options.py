"""The settings of the cluster in a recipe: the `launch.options` of the Kubernetes launcher."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import attrs
from attrs import validators as check

_Validator: TypeAlias = "Callable[[object, attrs.Attribute[str], str], None]"


def _is(what: str, pattern: str) -> _Validator:
    """A validator of text."""

    def validate(_instance: object, _attribute: attrs.Attribute[str], value: str) -> None:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"expected {what}, got {value!r}")

    return validate


_POSITIVE: Final = check.gt(0)
_WORD: Final = _is("a word without white space", r"\S+")
_NAME: Final = _is("a name of small letters, digits and dashes", r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY: Final = _is("a quantity such as 4Gi", r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_PATH: Final = _is("an absolute path", r"/[^\s:]+")
_RESOURCE: Final = _is("the name of a resource, such as nvidia.com/gpu", r"[-a-z0-9.]+/[-a-zA-Z0-9_.]+")


@attrs.frozen(kw_only=True)
class KubernetesOptions:
    """`launch.options` of the launcher `kubernetes`."""

    image: str = attrs.field(
        validator=_WORD,
        metadata={"help": "Container image with cosmos-core and the recipe's plugins."},
    )
    pvc: str = attrs.field(
        validator=_NAME,
        metadata={"help": "Claim of a volume that all pods can write to (ReadWriteMany); run.output_dir is on it."},
    )
    mount: str = attrs.field(default="/runs", validator=_PATH, metadata={"help": "Where the volume is mounted."})
    namespace: str | None = attrs.field(
        default=None, validator=check.optional(_NAME), metadata={"help": "Namespace; that of kubectl if absent."}
    )
    python: str = attrs.field(
        default="python3",
        validator=_WORD,
        metadata={"help": "Python interpreter in the image."},
    )
    gpus_per_node: int = attrs.field(
        default=0, validator=check.ge(0), metadata={"help": "GPUs of each node; 0 runs everything on CPUs."}
    )
    gpu_resource: str = attrs.field(
        default="nvidia.com/gpu",
        validator=_RESOURCE,
        metadata={"help": "Name of the cluster's GPU resource."},
    )
    cpus_per_process: int | None = attrs.field(
        default=None,
        validator=check.optional(_POSITIVE),
        metadata={"help": "CPUs of each process of a replica; `launch.threads` if absent."},
    )
    memory_per_process: str = attrs.field(
        default="4Gi", validator=_QUANTITY, metadata={"help": "Memory of each process of a replica."}
    )
    controller_cpus: int = attrs.field(
        default=2, validator=_POSITIVE, metadata={"help": "CPUs of the controller and the supervisor, which need none."}
    )
    controller_memory: str = attrs.field(default="4Gi", validator=_QUANTITY, metadata={"help": "Memory of these two."})
    shared_memory: str = attrs.field(
        default="1Gi", validator=_QUANTITY, metadata={"help": "Size of /dev/shm in each pod of a replica."}
    )
    max_restarts: int = attrs.field(
        default=10,
        validator=check.ge(0),
        metadata={"help": "How often the JobSet starts anew after its controller was lost; the run then goes on."},
    )
    grace_s: int = attrs.field(
        default=120,
        validator=_POSITIVE,
        metadata={"help": "Seconds that a pod has to end in: the run stops in it, with a checkpoint."},
    )
    node_selector: Mapping[str, str] = attrs.field(
        factory=dict, metadata={"help": 'Labels of the nodes for replicas, such as `{pool = "h100"}`.'}
    )
