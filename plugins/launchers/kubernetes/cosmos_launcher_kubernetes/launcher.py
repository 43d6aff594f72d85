"""A run on a Kubernetes cluster: submitted as a JobSet, and within it, orders to the pods of the replicas."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.protocols import Exit, LauncherContext, ProcessSpec
from cosmos_core.protocols.launcher import Submission
from cosmos_core.run.launch.local import LocalLauncher, thread_environment
from cosmos_launcher_kubernetes.manifest import CONTROLLER, manifest, pods
from cosmos_launcher_kubernetes.options import KubernetesOptions
from cosmos_launcher_kubernetes.orders import SESSION, Order, Orders

_APPLY_S: Final = 60.0
_POLL_S: Final = 0.1


class KubernetesLauncher:
    """Submits a run; in its JobSet, starts the controller beside the supervisor, and gives orders for the rest.

    Args:
        options: Of the cluster.
        context: The run.

    Raises:
        ConfigError: The run's folder is not on the shared volume, or a pool does not fit the nodes.
    """

    def __init__(self, options: KubernetesOptions, context: LauncherContext) -> None:
        self._options: Final = options
        self._context: Final = context
        self._pods: Final = pods(context, options)
        self._local: Final = LocalLauncher(context.logs)
        self._made: Orders | None = None
        self._given: Final[dict[str, int]] = {}
        self._running: Final[dict[str, int]] = {}

    # -- submitting ----------------------------------------------------------------------------------------------------

    def render(self) -> Submission:
        """The JobSet, and the recipe for it."""
        return Submission(
            name="jobset.yaml",
            text=manifest(self._context, self._options, self._pods),
            notes=(*(part.words for part in self._pods), *self._hints()),
            variables=None if self._options.env_from else frozenset(self._options.env),
        )

    def _hints(self) -> Iterator[str]:
        chosen = self._options.cpus_per_node or self._options.cpus_per_process or self._context.threads
        if any(part.gpus for part in self._pods) and not chosen:
            yield (
                "a process has a CPU for each thread and worker, and no more: launch.options.cpus_per_node gives each "
                "that has GPUs its share of a node's"
            )

    def ready(self) -> None:
        """Find out whether kubectl is here.

        Raises:
            ConfigError: It is not.
        """
        if shutil.which("kubectl") is None:
            raise ConfigError(
                "launch.launcher: 'kubernetes', but there is no kubectl here; print the manifest with --render-only, "
                "and apply it where there is one"
            )

    def submit(self, file: Path) -> str:
        """Apply the manifest.

        Raises:
            ReplicaError: It was refused.
        """
        command = ["kubectl", "apply", "--filename", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_APPLY_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReplicaError(f"kubectl apply could not be run: {error}") from error
        if done.returncode:
            raise ReplicaError(f"kubectl apply failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
        return done.stdout.strip()

    # -- within the JobSet ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Find out whether this is the controller's pod.

        Raises:
            ConfigError: It is not.
        """
        if not os.environ.get(SESSION):
            raise ConfigError(
                "launch.launcher: 'kubernetes' starts processes in the pods of a JobSet, and this is none; hand the "
                "run over with cosmos launch kubernetes, or run it here with --set launch.launcher=local"
            )

    def start(self, spec: ProcessSpec) -> None:
        """Start the controller here; of another process, leave the order.

        Raises:
            ReplicaError: The system refused.
        """
        if spec.name == CONTROLLER:
            self._local.start(spec)
            return
        number = self._given.get(spec.name, 0) + 1
        part = next((part for part in self._pods if spec.name.startswith(part.role)), self._pods[0])
        environment = {**spec.environment, **thread_environment(part.threads)}
        self._orders.give(spec.name, Order(number=number, spec=attrs.evolve(spec, environment=environment)))
        self._given[spec.name] = self._running[spec.name] = number

    def running(self) -> Sequence[str]:
        """Names of the processes that have not ended."""
        return [*self._local.running(), *self._running]

    def exits(self) -> list[Exit]:
        """Processes that ended since the last call."""
        found = self._local.exits()
        for name, number in list(self._running.items()):
            ended = self._orders.ended(name)
            if ended is not None and ended.number >= number:
                del self._running[name]
                found.append(ended.exit)
        return found

    def kill(self, name: str) -> None:
        """End a process at once."""
        if name == CONTROLLER:
            self._local.kill(name)
        elif name in self._running and self._given[name] == self._running[name]:
            # Given once: the number after that of the order which started it says what is to be killed.
            self._given[name] += 1
            self._orders.give(name, Order(number=self._given[name], spec=None))

    def signal_stop(self) -> None:
        """Ask every process to end; returns at once."""
        self._local.signal_stop()
        self._orders.end()

    def stop(self, grace_s: float) -> None:
        """Ask every process to end; pods end theirs, and themselves, within seconds."""
        self.signal_stop()
        self._local.stop(grace_s)
        deadline = time.monotonic() + grace_s
        while self._running and time.monotonic() < deadline:
            self.exits()
            time.sleep(_POLL_S)
        self._running.clear()

    @property
    def _orders(self) -> Orders:
        if self._made is None:
            self._made = Orders(self._context.directory, os.environ.get(SESSION, ""))
            self._made.open()
        return self._made
