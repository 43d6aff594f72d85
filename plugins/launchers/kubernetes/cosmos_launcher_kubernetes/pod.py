"""`python -m cosmos_launcher_kubernetes.pod RUN ROLE --processes N --gpus N`: what runs in a pod of a replica.

COSMOS_REPLICA and COSMOS_POD say which of the replicas, and which of its pods. It carries out the orders for its
processes until the supervisor says that all is over. Kubernetes asks a pod to end by SIGTERM; its processes go on then,
so that the run can be stopped with a checkpoint, until the supervisor or the end of the pod's grace period ends them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.devices import visible_gpus
from cosmos_core.errors import CosmosError, ReplicaError
from cosmos_core.protocols import Exit
from cosmos_core.run.launch.local import LocalLauncher
from cosmos_launcher_kubernetes.orders import SESSION, Ended, Order, Orders

MODULES: Final = ("cosmos_core.policy", "cosmos_core.rollout")
_POLL_S: Final = 0.2
_GRACE_S: Final = 5.0


class Pod:
    """The processes of one pod.

    Args:
        orders: For them.
        devices: GPUs of each process, by its name.
        launcher: Starts them.
    """

    def __init__(self, orders: Orders, devices: Mapping[str, str], launcher: LocalLauncher) -> None:
        self._orders: Final = orders
        self._devices: Final = devices
        self._launcher: Final = launcher
        # What was begun in this pod's place before it was restarted is not to be run again: it may be known to the run.
        self._taken: Final = {name: self._left(name) for name in devices}

    def run(self) -> None:
        """Carry out orders until all is over; no process is left.

        Raises:
            ReplicaError: An order cannot be read or carried out.
        """
        try:
            while not self._orders.is_over:
                for name in self._devices:
                    order = self._orders.newest(name)
                    if order is not None and order.number > self._taken[name]:
                        self._take(name, order)
                for end in self._launcher.exits():
                    self._orders.tell(Ended(number=self._taken[end.name], exit=end))
                time.sleep(_POLL_S)
        finally:
            self._launcher.stop(_GRACE_S)

    def _left(self, name: str) -> int:
        """The newest order of a name that was carried out before; what it started has ended with its container."""
        taken, end = self._orders.taken(name), self._orders.ended(name)
        told = 0 if end is None else end.number
        if taken > told:
            self._tell_killed(name, taken, "its container was restarted")
        return max(taken, told)

    def _take(self, name: str, order: Order) -> None:
        if order.spec is None:
            self._take_kill(name, order.number)
            return
        self._clear(name)
        self._taken[name] = order.number
        self._orders.take(name, order.number)
        if order.spec.module not in MODULES:
            raise ReplicaError(f"an order for {name} starts {order.spec.module}, which is none of {', '.join(MODULES)}")
        environment = {**order.spec.environment, "CUDA_VISIBLE_DEVICES": self._devices[name]}
        self._launcher.start(attrs.evolve(order.spec, environment=environment))

    def _take_kill(self, name: str, number: int) -> None:
        """Kill what the order before this one started, whose end is then told; it may have come too late to be seen."""
        is_seen = self._taken[name] == number - 1
        if is_seen:
            self._launcher.kill(name)
        else:
            self._clear(name)
        self._taken[name] = number
        if not is_seen:
            self._tell_killed(name, number, "it was killed before its pod had started it")

    def _tell_killed(self, name: str, number: int, why: str) -> None:
        self._orders.tell(Ended(number=number, exit=Exit(name=name, code=-signal.SIGKILL, error=why)))

    def _clear(self, name: str) -> None:
        """End what an earlier order started, of which the supervisor thinks as ended."""
        while name in self._launcher.running():
            self._launcher.kill(name)
            time.sleep(_POLL_S)
        for end in self._launcher.exits():
            if end.name != name:
                self._orders.tell(Ended(number=self._taken[end.name], exit=end))


def devices_of(names: Sequence[str], num_gpus: int, visible: Sequence[str]) -> dict[str, str]:
    """The GPUs of each process, in turn.

    Args:
        names: Of the processes.
        num_gpus: GPUs of each.
        visible: GPUs of the pod.

    Raises:
        ReplicaError: The pod has too few.
    """
    if len(visible) < len(names) * num_gpus:
        raise ReplicaError(
            f"{len(names)} processes need {num_gpus} GPUs each, and this pod has {len(visible)}; set "
            "launch.options.gpu_resource to what the cluster calls its GPUs"
        )
    return {name: ",".join(visible[i * num_gpus : (i + 1) * num_gpus]) for i, name in enumerate(names)}


def names_of(role: str, replica: int, pod: int, processes: int) -> list[str]:
    """The processes of one pod of a replica.

    Args:
        role: Of the replica.
        replica: Its index.
        pod: Which of the replica's pods.
        processes: Of each pod.
    """
    ranks = range(pod * processes, (pod + 1) * processes)
    return [f"{role}-{replica}.{rank}" if rank else f"{role}-{replica}" for rank in ranks]


def main(arguments: Sequence[str]) -> int:
    """Run a pod; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cosmos_launcher_kubernetes.pod", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("role", choices=("policy", "rollout"))
    parser.add_argument("--processes", type=int, default=1, help="processes of each pod")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each process")
    parser.add_argument("--pods", type=int, default=1, help="pods of each replica")
    parser.add_argument("--rollouts", type=int, default=0, help="rollout replicas on the same GPUs, in turns")
    parser.add_argument("--rollout-gpus", type=int, default=1, help="GPUs of each of these")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    index, part = int(os.environ["COSMOS_REPLICA"]), int(os.environ["COSMOS_POD"])
    try:
        orders = Orders(options.run, os.environ.get(SESSION, ""))
        names = names_of(options.role, index, part, options.processes)
        devices = devices_of(names, options.gpus, visible_gpus())
        first = (index * options.pods + part) * options.rollouts
        beside = [f"rollout-{first + number}" for number in range(options.rollouts)]
        devices |= devices_of(beside, options.rollout_gpus, visible_gpus())
        Pod(orders, devices, LocalLauncher(options.run / "logs")).run()
    except CosmosError as error:
        print(f"{options.role}-{index}: {error}", file=sys.stderr)  # noqa: T201 - a pod's log
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
