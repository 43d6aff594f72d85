"""A run on a Slurm cluster: submitted as a batch job, and within that job, every replica a step of its own."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.devices import num_threads
from cosmos_core.errors import ConfigError, ReplicaError, UnknownSubmissionError
from cosmos_core.protocols import Exit, LauncherContext, ProcessSpec
from cosmos_core.protocols.launcher import Submission
from cosmos_core.run.launch.local import LocalLauncher, by_command, python_command, thread_environment
from cosmos_launcher_slurm.cluster import Node, largest_node
from cosmos_launcher_slurm.components import CONTROLLER, Component, Step, components
from cosmos_launcher_slurm.options import SlurmOptions
from cosmos_launcher_slurm.script import job_name, script

_SUBMIT_S: Final = 60.0
_TASK: Final = "cosmos_launcher_slurm.task"


class SlurmLauncher:
    """Submits a run; in its job, starts the controller beside the supervisor and each replica by `srun`.

    Args:
        options: Of the cluster.
        context: The run.

    Raises:
        ConfigError: The run cannot be laid out on the nodes that the options describe.
    """

    def __init__(self, options: SlurmOptions, context: LauncherContext) -> None:
        self._options: Final = options
        self._context: Final = context
        self._components: Final = components(context.pools, options, context.threads, takes_turns=context.takes_turns)
        self._steps: Final = {role: (part, step) for part in self._components for role, step in part.steps.items()}
        self._local: Final = LocalLauncher(context.logs, by_command(self._command))
        self._sizes: Final[dict[str, int]] = {pool.role: pool.processes for pool in context.pools}

    # -- submitting ----------------------------------------------------------------------------------------------------

    def render(self) -> Submission:
        """The batch script."""
        return Submission(
            name="job.sh",
            text=script(self._context, self._options, self._components, Path.cwd()),
            notes=tuple(f"component {part.group}, {part.role}: {self._words(part)}" for part in self._components),
        )

    def _words(self, part: Component) -> str:
        cpus, processes = f"{_count(part.cpus_per_task, 'CPU')} each", _count(part.tasks, "process", "es")
        if part.nodes is None:
            without = "" if part.role == CONTROLLER else " without GPUs (launch.options.gpus_per_node gives them)"
            return f"{processes}{without}, {cpus}"
        if not (self._options.cpus_per_node or self._options.cpus_per_process or self._context.threads):
            cpus = f"{cpus} (launch.options.cpus_per_node gives each its share of a node's)"
        nodes, gib = _count(part.nodes, "node"), math.ceil(part.memory_bytes / 2**30)
        memory = f"; {gib:,} GiB of memory on each by the plan" if gib else ""
        return f"{nodes} of {_count(part.gpus_per_node, 'GPU')}, {processes} on each, {cpus}{memory}"

    def ready(self) -> None:
        """Find out whether sbatch is here, and whether the largest node is large enough.

        Raises:
            ConfigError: It is not.
        """
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "launch.launcher: 'slurm', but there is no sbatch here; run this where jobs are submitted, or print "
                "the script with --render-only"
            )
        node = largest_node(self._options.partition)
        for part in self._components:
            _check_room(part, node)

    def submit(self, file: Path) -> str:
        """Hand the script to sbatch.

        Raises:
            ReplicaError: It was refused.
            UnknownSubmissionError: Slurm did not answer in time; it may have taken the job.
        """
        command = ["sbatch", "--parsable", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SUBMIT_S)
        except subprocess.TimeoutExpired as error:
            raise self._unknown(f"sbatch {file} did not end within {_SUBMIT_S:g} s") from error
        except OSError as error:
            raise ReplicaError(f"sbatch {file} could not be run: {error}") from error
        if done.returncode and "timed out" in done.stderr.lower():
            raise self._unknown(f"sbatch {file}: {done.stderr.strip()}")
        if done.returncode:
            raise ReplicaError(f"sbatch refused {file}: {done.stderr.strip() or f'exit code {done.returncode}'}")
        job = done.stdout.strip().partition(";")[0]
        return (
            f"Slurm job {job}; watch it with squeue --job={job}, stop it with scancel --batch --signal=TERM {job}, "
            f"stop and requeue it with scancel --batch --signal=USR1 {job}"
        )

    def _unknown(self, what: str) -> UnknownSubmissionError:
        name, directory = shlex.quote(job_name(self._context.name)), shlex.quote(str(self._context.directory))
        return UnknownSubmissionError(
            f"{what}: the run may have been submitted. See squeue --name={name}; if it is not there, submit it with "
            f"cosmos launch slurm --resume {directory}"
        )

    # -- within the job ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Find out whether this is a job of ours.

        Raises:
            ConfigError: It is none, or has too few components.
        """
        if "SLURM_JOB_ID" not in os.environ:
            raise ConfigError(
                "launch.launcher: 'slurm' starts processes within a job of Slurm, and this is none; hand the run over "
                "with cosmos launch slurm, or run it here with --set launch.launcher=local"
            )
        size = int(os.environ.get("SLURM_HET_SIZE", "1"))
        if size != len(self._components):
            parts = ", ".join(part.role for part in self._components)
            raise ConfigError(
                f"this job of Slurm has {size} components, and the run needs {len(self._components)} "
                f"({parts}); submit it anew with cosmos launch slurm --resume"
            )

    def start(self, spec: ProcessSpec) -> None:
        """Start the controller here, and a replica, with all of its processes, as a step.

        Raises:
            ReplicaError: The system refused.
        """
        if _rank(spec.name) == 0:
            self._local.start(spec)

    def running(self) -> Sequence[str]:
        """Names of the processes that have not ended."""
        return [name for leader in self._local.running() for name in self._processes(leader)]

    def exits(self) -> list[Exit]:
        """Processes that ended since the last call; those of a replica end together."""
        return [attrs.evolve(end, name=name) for end in self._local.exits() for name in self._processes(end.name)]

    def kill(self, name: str) -> None:
        """End a replica's step, or the controller."""
        leader = name.partition(".")[0]
        if leader == CONTROLLER:
            self._local.kill(leader)
        else:
            # srun ends its step then; if it were killed itself, the step would go on without it.
            self._local.terminate(leader)

    def signal_stop(self) -> None:
        """Ask every process to end; returns at once."""
        self._local.signal_stop()

    def stop(self, grace_s: float) -> None:
        """End every process; a step ends with its srun."""
        self._local.stop(grace_s)

    def _processes(self, leader: str) -> list[str]:
        """Names of the processes of the replica of a first process."""
        size = self._sizes.get(_role(leader), 1)
        return [leader, *(f"{leader}.{rank}" for rank in range(1, size))]

    def _command(self, spec: ProcessSpec) -> list[str]:
        role = _role(spec.name)
        if role == CONTROLLER:
            return python_command(spec)
        part, step = self._steps[role]
        node, gpu = step.place(int(spec.name.partition("-")[2]))
        task = [*python_command(attrs.evolve(spec, module=_TASK, arguments=())), str(step.gpus_per_task), str(gpu)]
        threads = thread_environment(num_threads(self._context.threads, step.threads))
        # Told first, the name and the CPUs of the batch step would count for every step.
        unset = [argument for name in ("SLURM_CPUS_PER_TASK", "SLURM_NTASKS") for argument in ("-u", name)]
        return [
            "env",
            *unset,
            *(f"{name}={value}" for name, value in threads.items()),
            "srun",
            f"--het-group={part.group}",
            f"--job-name={spec.name}",
            *_shape(step, node),
            *task,
            spec.module,
            *spec.arguments,
        ]


def _count(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{ending * (number > 1)}"


def _role(name: str) -> str:
    """The pool of a process, or the controller: `policy` of `policy-0.1`."""
    return name.partition("-")[0]


def _rank(name: str) -> int:
    return int(name.partition(".")[2] or 0)


def _shape(step: Step, node: int) -> list[str]:
    """The resources of a step: its own CPUs and GPUs; memory is shared in the job, or no second step would start.

    One of a pool that shares GPUs overlaps the others there: it has all CPUs and GPUs of its nodes; its tasks choose.
    """
    words = [
        f"--ntasks={step.tasks}",
        f"--cpus-per-task={step.cpus_per_task}",
        "--mem=0",
        "--kill-on-bad-exit=1",
        "--wait=30",
    ]
    if step.nodes is not None:
        words += [f"--nodes={step.nodes}", f"--gpus-per-node={step.gpus_per_node}"]
    if step.beside and step.nodes is not None:
        each = step.tasks // step.nodes
        return [*words, f"--relative={node}", f"--ntasks-per-node={each}", "--overlap", "--cpu-bind=none"]
    return [*words, "--exact"]


def _check_room(part: Component, node: Node) -> None:
    """Refuse what no node has."""
    for needed, has, what in ((part.node_cpus, node.cpus, "CPUs"), (part.gpus_per_node, node.gpus, "GPUs")):
        if needed > has:
            raise ConfigError(
                f"the {part.role} component needs {needed} {what} of one node, and the largest node of "
                f"{node.partition} has {has}; change launch.options, or the recipe's {part.role} table"
            )
