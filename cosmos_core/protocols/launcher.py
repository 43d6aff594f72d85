"""The protocol of launcher plugins: start the processes of a run, and, on a cluster, hand the run over to it.

Every run is supervised by `cosmos run`, which starts its processes through a launcher. Where they run on other machines
than the one where the run is planned, the supervisor itself must get there first: such a launcher submits, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import attrs


@attrs.frozen(kw_only=True)
class ProcessSpec:
    """One process of a run.

    Attributes:
        name: Its name in logs and tables: `controller`, `policy-0`; further ones of a replica are `policy-0.1`, ….
        module: The Python module to start it by.
        arguments: Its command line, after the module.
        environment: What to set besides the supervisor's own environment.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Exit:
    """A process that ended by itself; `code` is negative for a signal, `error` its last words (may be empty)."""

    name: str
    code: int
    error: str


@attrs.frozen(kw_only=True)
class Pool:
    """The replicas of one role, as the recipe wants them.

    Attributes:
        role: Whose replicas.
        replicas: How many.
        processes: Processes of each that the launcher starts.
        gpus: GPUs that each process uses where its machine has some; 0 if it is kept on the CPU.
        needs_gpus: Whether the recipe wants GPUs whatever the machine has.
        workers: Processes that each of them starts besides, for rewards and environments.
        device_bytes: Memory that the plan counts for each process where it computes: on its GPUs, or of the machine
            where it uses none. 0 where nothing is planned: within the job, or where a run is submitted again.
        host_bytes: Memory of the machine that it counts besides.
        uncounted: What it does not count, in words.
    """

    role: Literal["policy", "rollout"]
    replicas: int
    processes: int = 1
    gpus: int = 0
    needs_gpus: bool = False
    workers: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    uncounted: tuple[str, ...] = ()

    def nodes(self, room: int) -> int:
        """Fewest nodes, of `room` processes each, that hold one replica with equally many of its processes on each."""
        even = (count for count in range(1, self.processes + 1) if self.processes % count == 0)
        return next(count for count in even if self.processes // count <= room)


@attrs.frozen(kw_only=True)
class LauncherContext:
    """The run, as a launcher is told of it.

    Attributes:
        name: `run.name`.
        directory: The run's folder, `<run.output_dir>/<run.name>`; it need not be there yet.
        pools: The replicas to start.
        threads: OpenMP threads of each process (`launch.threads`); None leaves them to the launcher.
        recipe: The resolved recipe, as TOML.
        takes_turns: Whether rollout replicas are to be on the GPUs of the policy's (`colocates`).
    """

    name: str
    directory: Path
    pools: tuple[Pool, ...]
    threads: int | None = None
    recipe: str = ""
    takes_turns: bool = False

    @property
    def logs(self) -> Path:
        """The folder of the output of processes: `<logs>/<name>.log`."""
        return self.directory / "logs"


@attrs.frozen(kw_only=True)
class LauncherCapabilities:
    """The abilities of a launcher.

    Attributes:
        submits: Whether `cosmos launch` hands runs over to it, to run on other machines (`ClusterLauncher`).
        shares_folder: Of one that submits: whether the machines see the files of the one that submits. The run's folder
            is then made before it is handed over; if not, it is made there, from the recipe.
        colocates: Whether it can start rollout replicas on the GPUs of the policy's, which then take turns
            (`rollout.placement`). One that submits is told to by its context; for others, specs say which GPUs.
    """

    submits: bool = False
    shares_folder: bool = True
    colocates: bool = False


class Launcher(Protocol):
    """Starts, watches and stops the processes of a run by name, for its supervisor, from one thread."""

    def check(self) -> None:
        """Find out whether processes can be started from here; nothing is started.

        Raises:
            ConfigError: They cannot; the message says how they can.
        """

    def start(self, spec: ProcessSpec) -> None:
        """Start a process; its output is kept with the run's logs. A name may be started again once it has ended.

        Raises:
            ReplicaError: It could not be started.
        """

    def running(self) -> Sequence[str]:
        """Names of the processes that have not ended."""

    def exits(self) -> list[Exit]:
        """Processes that ended since the last call."""

    def kill(self, name: str) -> None:
        """End a process at once, whatever it is doing; `exits` tells of it. One that has ended is left alone."""

    def signal_stop(self) -> None:
        """Ask every process to end; returns at once."""

    def stop(self, grace_s: float) -> None:
        """Ask every process to end, and kill what has not ended after `grace_s`; nothing is left behind."""


@attrs.frozen(kw_only=True)
class Submission:
    """A run as a scheduler takes it.

    Attributes:
        name: Of the file, such as `job.sh`.
        text: Its content.
        notes: Lines for people: what was derived from the plan.
        variables: Names of the environment variables that it gives all processes; None where they have those of whoever
            submits it, or others that are not known here.
    """

    name: str
    text: str
    notes: tuple[str, ...] = ()
    variables: frozenset[str] | None = None


@runtime_checkable
class ClusterLauncher(Launcher, Protocol):
    """A launcher that hands runs over to a scheduler (`LauncherCapabilities.submits`)."""

    def render(self) -> Submission:
        """Write the run down for the scheduler; the same for the same options and context. Nothing is asked or changed.

        Raises:
            ConfigError: The run does not fit, as far as the options tell.
        """

    def ready(self) -> None:
        """Find out whether `submit` would reach the scheduler, and whether the run fits its machines.

        Raises:
            ConfigError: It would not, or it does not fit.
        """

    def submit(self, file: Path) -> str:
        """Hand over a submission that was written to `file`; a line for people on what became of it.

        Raises:
            ReplicaError: The scheduler refused; a folder that was made for the run is removed.
            UnknownSubmissionError: It did not answer, and may have taken the run: the folder stays.
        """
