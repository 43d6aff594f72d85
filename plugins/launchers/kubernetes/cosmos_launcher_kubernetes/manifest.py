"""The manifest of a run: a ConfigMap with the recipe, and a JobSet with the controller and each pool of replicas.

Pods of a JobSet reach each other by address; its headless service, named like the run, gives them names besides. The
run's folder is on a volume that all share. A controller that is lost, or asked to end, restarts the JobSet, and the run
goes on; one that says that the run has failed, or cannot run, fails it. A replica's container is restarted alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final, Literal, TypeAlias

import attrs
import yaml

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import LauncherContext, Pool
from cosmos_core.run.launch.launcher import cpus_of, nodes_of, rollouts_beside, threads_of
from cosmos_launcher_kubernetes.options import ATTEMPT, POD, REPLICA, UID, Entry, KubernetesOptions, Source
from cosmos_launcher_kubernetes.orders import SESSION

Plain: TypeAlias = "Mapping[str, Plain] | Sequence[Plain] | str | int | bool"

CONTROLLER: Final = "controller"
FAILED: Final = 1
"""Exit code of the controller's pod: the run has failed, and would again."""
REFUSED: Final = 2
"""Exit code of the controller's pod: the recipe cannot run."""

_CONTAINER: Final = "cosmos"
_RECIPE: Final = "recipe.toml"
_RECIPES: Final = "/etc/cosmos"
_LABEL: Final = "metadata.labels['jobset.sigs.k8s.io/{}']"
_COMPLETION: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_PLAIN: Final = re.compile(r"[\w./-]+", re.ASCII)
_GIB: Final = 1 << 30
_BESIDE_GIB: Final = 4
"""Of each process, or each GPU of one, besides what a plan counts: Python, libraries, CUDA's own memory, rows."""
_WORKER_GIB: Final = 1
"""Of each process that it starts for rewards or environments."""
_USABLE: Final = 0.9
"""Of the rest: an estimate that is exceeded ends the process."""
_LONGEST_NAME: Final = 40  # of a JobSet: its pods' names, with role and indices, have at most 63 letters


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and everything in full where it is used twice."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - as PyYAML asks
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


@attrs.frozen(kw_only=True)
class Pods:
    """The pods of one pool of replicas, or of two that take turns.

    Attributes:
        role: Of its replicas.
        replicas: How many.
        pods: Pods of each replica.
        processes: Processes in each pod.
        gpus: GPUs of each process.
        cpus: Of each pod.
        threads: OpenMP threads of each process.
        memory: Of each pod.
        uncounted: What the plan does not count, where `memory` is the plan's.
        rollouts: Rollout replicas that each pod has room for besides, on the same GPUs.
        rollout_gpus: GPUs of each of these.
    """

    role: Literal["policy", "rollout"]
    replicas: int
    pods: int
    processes: int
    gpus: int
    cpus: int
    threads: int
    memory: str
    uncounted: tuple[str, ...] = ()
    rollouts: int = 0
    rollout_gpus: int = 0

    @property
    def words(self) -> str:
        """For people."""
        gpus = f", {self.gpus} GPUs each" if self.gpus else ""
        if self.rollouts:
            gpus += f", in turns with {self.rollouts} rollout replicas of {self.rollout_gpus} GPUs"
        lacking = f" (the plan does not count {', '.join(self.uncounted)})" if self.uncounted else ""
        return (
            f"{self.role}: {self.replicas} replicas of {self.pods} pods with {self.processes} processes{gpus}; "
            f"{self.cpus} CPUs and {self.memory} of memory a pod{lacking}"
        )


def pods(context: LauncherContext, options: KubernetesOptions) -> tuple[Pods, ...]:
    """The pods of each pool: as few as nodes allow, with equally many processes in each.

    Raises:
        ConfigError: The run's folder is not on the volume, or nodes lack GPUs.
    """
    if not context.directory.is_relative_to(options.mount):
        raise ConfigError(
            f"run.output_dir: {str(context.directory.parent)!r} is not on the volume, which is mounted at "
            f"{options.mount} (launch.options.mount); set run.output_dir to a folder there"
        )
    if context.takes_turns and context.pools[0].gpus and options.gpus_per_node:
        policy, rollout = context.pools
        return (_pods(policy, options, context.threads, rollout),)
    return tuple(_pods(pool, options, context.threads) for pool in context.pools)


def _pods(pool: Pool, options: KubernetesOptions, threads: int | None, beside: Pool | None = None) -> Pods:
    count = nodes_of(pool, options.gpus_per_node, "gpus_per_node")
    gpus, count = (pool.gpus, count) if count else (0, 1)
    processes, uncounted, num_beside = pool.processes // count, pool.uncounted, 0
    memory_gib = processes * _memory_gib(pool, gpus)
    if beside is not None:
        pool = attrs.evolve(pool, workers=beside.workers)
        num_beside = rollouts_beside(beside, gpus * processes, count * pool.replicas)
        memory_gib += num_beside * _memory_gib(beside, beside.gpus)
        uncounted = tuple(dict.fromkeys((*uncounted, *beside.uncounted)))
    memory = f"{memory_gib}Gi"
    if options.memory_per_process is not None:
        memory, uncounted = _times(options.memory_per_process, processes + num_beside), ()
    cpus = options.cpus_per_process or cpus_of(pool, threads, options.cpus_per_node, options.gpus_per_node)
    return Pods(
        role=pool.role,
        replicas=pool.replicas,
        pods=count,
        processes=processes,
        gpus=gpus,
        cpus=processes * cpus,
        threads=threads or threads_of(cpus, gpus, pool.workers),
        memory=memory,
        uncounted=uncounted,
        rollouts=num_beside,
        rollout_gpus=beside.gpus if beside is not None else 0,
    )


def _memory_gib(pool: Pool, gpus: int) -> int:
    """Memory of a process that has so many GPUs, as the plan counts it."""
    # What lies on GPUs where there are some is in the machine's memory where there are none.
    planned = pool.host_bytes + (0 if gpus else pool.device_bytes)
    return math.ceil(planned / _USABLE / _GIB) + _BESIDE_GIB * max(1, gpus) + _WORKER_GIB * pool.workers


def manifest(context: LauncherContext, options: KubernetesOptions, pools: Sequence[Pods]) -> str:
    """The manifest as YAML."""
    name = _name(context.name)
    namespace = {"namespace": options.namespace} if options.namespace else {}
    metadata: dict[str, Plain] = {"name": name, **namespace, "labels": {"app.kubernetes.io/name": "cosmos-core"}}
    config_map: dict[str, Plain] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "name": f"{name}-recipe"},
        "data": {_RECIPE: context.recipe},
    }
    job_set: dict[str, Plain] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [CONTROLLER]},
            "failurePolicy": {
                "maxRestarts": options.max_restarts,
                "rules": [
                    {
                        "name": "runHasFailed",
                        "action": "FailJobSet",
                        "targetReplicatedJobs": [CONTROLLER],
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                _controller(name, options),
                *(_replicas(part, context, options) for part in pools),
            ],
        },
    }
    return yaml.dump_all([config_map, job_set], Dumper=_Dumper, explicit_start=True, sort_keys=False, width=10_000)


def _name(run: str) -> str:
    """A run's name as that of an object: small letters, digits and dashes.

    Raises:
        ConfigError: It is too long.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not name or not name[0].isalpha():
        name = f"run-{name}".rstrip("-")
    if len(name) > _LONGEST_NAME:
        raise ConfigError(f"run.name: {run!r} has more than {_LONGEST_NAME} letters, too many for the names of pods")
    return name


def _controller(name: str, options: KubernetesOptions) -> Plain:
    command = [options.python, "-P", "-m", "cosmos_launcher_kubernetes.controller", f"{_RECIPES}/{_RECIPE}"]
    resources = {"cpu": str(options.controller_cpus), "memory": options.controller_memory}
    mounts: list[Plain] = [{"name": "recipe", "mountPath": _RECIPES, "readOnly": True}]
    volumes: list[Plain] = [{"name": "recipe", "configMap": {"name": f"{name}-recipe"}}]
    spec = _pod(options, command, resources, mounts, volumes, restart="Never", session=_session(), selector={})
    codes: Plain = {"containerName": _CONTAINER, "operator": "In", "values": [FAILED, REFUSED]}
    policy: dict[str, Plain] = {"podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]}}
    return {"name": CONTROLLER, "replicas": 1, "template": _job(1, 0, spec, policy)}


def _replicas(part: Pods, context: LauncherContext, options: KubernetesOptions) -> Plain:
    module = "cosmos_launcher_kubernetes.pod"
    command = [
        *(options.python, "-P", "-m", module, str(PurePosixPath(context.directory)), part.role),
        *(f"--processes={part.processes}", f"--gpus={part.gpus}"),
        *(
            (f"--pods={part.pods}", f"--rollouts={part.rollouts}", f"--rollout-gpus={part.rollout_gpus}")
            if part.rollouts
            else ()
        ),
    ]
    resources = {"cpu": str(part.cpus), "memory": part.memory}
    if part.gpus:
        resources |= {name: str(number) for name, number in options.resources.items()}
        resources[options.gpu_resource] = str(part.gpus * part.processes)
    mounts: list[Plain] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - where the system has it
    shared = options.shared_memory or part.memory
    volumes: list[Plain] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}}]
    places: list[Plain] = [
        {"name": REPLICA, "valueFrom": {"fieldRef": {"fieldPath": _LABEL.format("job-index")}}},
        {"name": POD, "valueFrom": {"fieldRef": {"fieldPath": _COMPLETION}}},
    ]
    session = [*_session(), *places]
    spec = _pod(
        options,
        command,
        resources,
        mounts,
        volumes,
        restart="OnFailure",
        session=session,
        selector=options.node_selector,
        capabilities=options.capabilities,
    )
    if options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    # A container that fails is restarted as often as it takes: whether the run can go on, its controller decides.
    return {
        "name": part.role,
        "replicas": part.replicas,
        "template": _job(part.pods, 1_000_000, spec, annotations=options.annotations),
    }


def _session() -> list[Plain]:
    """The identity of one start of the JobSet, in every pod: its uid, and how often it was restarted."""
    labels = {UID: "jobset-uid", ATTEMPT: "restart-attempt"}
    found: list[Plain] = [
        {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": _LABEL.format(label)}}}
        for variable, label in labels.items()
    ]
    return [*found, {"name": SESSION, "value": f"$({UID})-$({ATTEMPT})"}]


def _job(
    num_pods: int,
    retries: int,
    pod: Plain,
    policy: Mapping[str, Plain] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Plain:
    metadata: dict[str, Plain] = {"metadata": {"annotations": dict(annotations)}} if annotations else {}
    return {
        "spec": {
            "completions": num_pods,
            "parallelism": num_pods,
            "completionMode": "Indexed",
            "backoffLimit": retries,
            **(policy or {}),
            "template": {**metadata, "spec": pod},
        }
    }


def _pod(
    options: KubernetesOptions,
    command: list[str],
    resources: Mapping[str, str],
    mounts: list[Plain],
    volumes: list[Plain],
    *,
    restart: str,
    session: list[Plain],
    selector: Mapping[str, str],
    capabilities: Sequence[str] = (),
) -> dict[str, Plain]:
    given = [_variable(name, value) for name, value in options.env.items()]
    container: dict[str, Plain] = {
        "name": _CONTAINER,
        "image": options.image,
        "command": command,
        "env": [*session, {"name": "OMP_NUM_THREADS", "value": "1"}, *given],
        **({"envFrom": [_whole(source) for source in options.env_from]} if options.env_from else {}),
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": [{"name": "runs", "mountPath": options.mount}, *mounts],
        **({"securityContext": {"capabilities": {"add": [*capabilities]}}} if capabilities else {}),
    }
    tolerations = [attrs.asdict(each, filter=lambda _, value: value is not None) for each in options.tolerations]
    chosen: dict[str, Plain] = {
        "nodeSelector": dict(selector),
        "tolerations": tolerations,
        "serviceAccountName": options.service_account or "",
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
    }
    return {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": options.grace_s,
        **{key: value for key, value in chosen.items() if value},
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": options.pvc}}, *volumes],
    }


def _variable(name: str, value: str | Entry) -> Plain:
    if isinstance(value, str):
        # A double $ is one that Kubernetes leaves alone: $(NAME) would be another variable.
        return {"name": name, "value": value.replace("$", "$$")}
    kind = "secretKeyRef" if value.secret else "configMapKeyRef"
    return {"name": name, "valueFrom": {kind: {"name": value.secret or value.config_map or "", "key": value.key}}}


def _whole(source: Source) -> Plain:
    return {"secretRef" if source.secret else "configMapRef": {"name": source.secret or source.config_map or ""}}


def _times(quantity: str, count: int) -> str:
    """A quantity of memory, several times."""
    number, unit = re.fullmatch(r"([0-9.]+)(.*)", quantity).groups()  # type: ignore[union-attr]  # by its validator
    product = float(number) * count
    return f"{product:g}{unit}" if product < 1e6 else f"{product:.0f}{unit}"
