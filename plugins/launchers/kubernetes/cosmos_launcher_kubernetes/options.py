"""The settings of the cluster in a recipe: the `launch.options` of the Kubernetes launcher."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

import attrs
from attrs import validators as check

from cosmos_core.run.launch.local import thread_environment
from cosmos_launcher_kubernetes.orders import SESSION

UID: Final = "COSMOS_JOBSET_UID"
ATTEMPT: Final = "COSMOS_JOBSET_ATTEMPT"
REPLICA: Final = "COSMOS_REPLICA"
POD: Final = "COSMOS_POD"
_OURS: Final = frozenset({SESSION, UID, ATTEMPT, REPLICA, POD, "CUDA_VISIBLE_DEVICES", *thread_environment(1)})
"""Variables that pods and their processes get from the launcher."""

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
_OBJECT: Final = _is(
    "a name of small letters, digits, dashes and dots",
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
)
_KEY: Final = _is("a key of letters, digits, dashes, dots and underscores", r"[-._a-zA-Z0-9]{1,253}")
_LABEL: Final = _is(
    "a key such as nvidia.com/gpu",
    r"([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
)
_VALUE: Final = _is("the value of a taint", r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def _variables(
    _instance: object, _attribute: attrs.Attribute[Mapping[str, object]], given: Mapping[str, object]
) -> None:
    for name in given:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"expected names of letters, digits and underscores, got {name!r}")
        if name in _OURS:
            raise ValueError(
                f"got {name!r}, which the launcher sets itself; leave it out (for threads: launch.threads)"
            )


@attrs.frozen(kw_only=True)
class Source:
    """A Secret or a ConfigMap of the run's namespace, which is there already."""

    secret: str | None = attrs.field(
        default=None, validator=check.optional(_OBJECT), metadata={"help": "Name of the Secret."}
    )
    config_map: str | None = attrs.field(
        default=None, validator=check.optional(_OBJECT), metadata={"help": "Name of the ConfigMap."}
    )

    @config_map.validator
    def _is_one(self, _attribute: attrs.Attribute[str | None], value: str | None) -> None:
        if (self.secret is None) == (value is None):
            raise ValueError(f"expected one of secret and config_map, got {'neither' if value is None else 'both'}")


@attrs.frozen(kw_only=True)
class Entry(Source):
    """One value of a Secret or a ConfigMap."""

    key: str = attrs.field(validator=_KEY, metadata={"help": "Its key there."})


@attrs.frozen(kw_only=True)
class Toleration:
    """A taint of nodes that pods may run on nevertheless."""

    key: str = attrs.field(validator=_LABEL, metadata={"help": "Key of the taint."})
    operator: Literal["Exists", "Equal"] = attrs.field(metadata={"help": "Whether the taint's value counts."})
    value: str | None = attrs.field(
        default=None, validator=check.optional(_VALUE), metadata={"help": "Value of the taint, for Equal."}
    )

    @value.validator
    def _counts(self, _attribute: attrs.Attribute[str | None], value: str | None) -> None:
        if (self.operator == "Equal") != (value is not None):
            raise ValueError(f"expected a value for 'Equal' and none for 'Exists', got {value!r} for {self.operator!r}")

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = attrs.field(
        default=None, metadata={"help": "Effect of the taint; any if absent."}
    )


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
    cpus_per_node: int | None = attrs.field(
        default=None,
        validator=check.optional(_POSITIVE),
        metadata={"help": "CPUs of a node for its pods (Allocatable, less DaemonSets); shared out by GPUs."},
    )
    cpus_per_process: int | None = attrs.field(
        default=None,
        validator=check.optional(_POSITIVE),
        metadata={"help": "CPUs of each process; `launch.threads`, and one for each of its workers, if absent."},
    )
    memory_per_process: str | None = attrs.field(
        default=None,
        validator=check.optional(_QUANTITY),
        metadata={"help": "Memory of each process of a replica; what the plan counts of it, and more, if absent."},
    )
    controller_cpus: int = attrs.field(
        default=2, validator=_POSITIVE, metadata={"help": "CPUs of the controller and the supervisor, which need none."}
    )
    controller_memory: str = attrs.field(default="4Gi", validator=_QUANTITY, metadata={"help": "Memory of these two."})
    shared_memory: str | None = attrs.field(
        default=None,
        validator=check.optional(_QUANTITY),
        metadata={"help": "Most of a replica pod's memory that /dev/shm may take; all of it if absent."},
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
    resources: Mapping[str, int] = attrs.field(
        factory=dict,
        validator=check.deep_mapping(_RESOURCE, _POSITIVE),
        metadata={"help": 'More resources of each pod with GPUs, such as `{"rdma/hca" = 8}`.'},
    )
    host_network: bool = attrs.field(
        default=False, metadata={"help": "Whether replicas use the network of their node, as InfiniBand often needs."}
    )
    capabilities: tuple[str, ...] = attrs.field(
        default=(),
        validator=check.deep_iterable(_is("a capability such as IPC_LOCK", r"[A-Z][A-Z_]*")),
        metadata={"help": "Capabilities of Linux for replicas; RDMA needs `IPC_LOCK`, to pin memory."},
    )
    annotations: Mapping[str, str] = attrs.field(
        factory=dict,
        validator=check.deep_mapping(_LABEL, check.instance_of(str)),
        metadata={"help": 'Annotations of the pods of replicas, such as `{"k8s.v1.cni.cncf.io/networks" = "ib0"}`.'},
    )
    tolerations: tuple[Toleration, ...] = attrs.field(
        default=(), metadata={"help": 'Taints that all pods tolerate, such as `{key = "gpu", operator = "Exists"}`.'}
    )
    service_account: str | None = attrs.field(
        default=None, validator=check.optional(_OBJECT), metadata={"help": "Of all pods; the namespace's if absent."}
    )
    image_pull_secrets: tuple[str, ...] = attrs.field(
        default=(), validator=check.deep_iterable(_OBJECT), metadata={"help": "Secrets by which images are pulled."}
    )
    env: Mapping[str, str | Entry] = attrs.field(
        factory=dict,
        validator=_variables,
        metadata={
            "help": 'Environment variables of all pods: text, or `{secret = "NAME", key = "KEY"}`, or '
            '`{config_map = "NAME", key = "KEY"}`. Text can be read in the manifest and in the recipe.'
        },
    )
    env_from: tuple[Source, ...] = attrs.field(
        default=(),
        metadata={"help": 'All of a Secret or ConfigMap as environment variables: `{secret = "NAME"}`.'},
    )
