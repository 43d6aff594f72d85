"""Starts the processes of replicas, and tells which replicas have joined and which have ended."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Collection, Sequence
from typing import Final

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.mesh import world_size
from cosmos_core.control.machine.state import State
from cosmos_core.devices import num_threads, visible_gpus
from cosmos_core.replica.lifetime import LOST, REFUSED
from cosmos_core.run.launch import Exit, Launcher, ProcessSpec
from cosmos_core.run.launch.launcher import pools, threads_of
from cosmos_core.run.launch.local import thread_environment
from cosmos_core.transport.messages import Role

CONTROLLER: Final = "controller"
_GPU_SETTINGS: Final = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""cuDNN's attention would make a plan for each new shape, and documents have many. Where a collective has failed with a
lost replica, NCCL's monitor would, having dumped what it recorded, end the process."""

_ALLOCATOR: Final = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
"""Variables by which a user sets up torch's memory of GPUs: then it stays so."""


def controller_spec(job: Job, *, resume_step: int | None, port: int | None = None) -> ProcessSpec:
    """The controller, which listens at `port` if given, not at `control.port`.

    `resume_step` is of the checkpoint to go on from; None for a new run, and for one that its journal goes on.
    """
    resumed = () if resume_step is None else ("--resume-step", str(resume_step))
    listening = () if port is None else ("--port", str(port))
    return ProcessSpec(
        name=CONTROLLER,
        module="cosmos_core.control",
        arguments=("--run", str(job.directory), *resumed, *listening),
        environment=thread_environment(1),
    )


def replica_specs(
    job: Job, address: str, checkpoint: str | None, replicas: Sequence[tuple[Role, str]] | None = None
) -> list[ProcessSpec]:
    """Every process of some replicas, given by role and name, or of all that a run starts with.

    Policy replicas start from `checkpoint` if there is one.

    A policy replica's processes after the first are named `policy-0.1`, `policy-0.2`, …. Each process sees one GPU, in
    turn, where this machine has some and its pool is not kept on the CPU; a rollout replica, whose engine starts what
    other processes it has, sees one for each. Pools that share GPUs begin with the same one.
    """
    recipe = job.recipe
    if replicas is None:
        rollouts = range(recipe.rollout.replicas if job.uses_rollouts else 0)
        replicas = [
            *(("policy", f"policy-{index}") for index in range(recipe.policy.replicas)),
            *(("rollout", f"rollout-{index}") for index in rollouts),
        ]
    started = ("--checkpoint", checkpoint) if checkpoint else ()
    sizes = {"policy": world_size(recipe.policy.mesh), "rollout": 1}
    names = [
        (role, name, (*(started if role == "policy" else ()), *extra))
        for role, replica in replicas
        for name, extra in _processes(replica, sizes[role])
    ]
    visible = visible_gpus()
    gpus = dict.fromkeys(("policy", "rollout"), itertools.cycle(visible or [""]))
    if job.takes_turns:
        gpus["rollout"] = itertools.cycle(visible or [""])
    on_cpu = {"policy": recipe.policy.device == "cpu", "rollout": recipe.rollout.device == "cpu"}
    # A policy's memory fragments, by documents of every length; an engine's is laid out once.
    allocator = {} if _ALLOCATOR & os.environ.keys() else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    num_gpus = {"policy": 1, "rollout": world_size(recipe.rollout.mesh)}
    cores = len(os.sched_getaffinity(0)) // max(1, len(visible))
    threads = {
        pool.role: num_threads(
            recipe.launch.threads, threads_of(cores * pool.gpus, pool.gpus if visible else 0, pool.workers)
        )
        for pool in pools(recipe, uses_rollouts=True)
    }
    # The numbers of `nvidia-smi`, by which plans count memory; a user's own choice stays in the order that it was made.
    order = {} if "CUDA_VISIBLE_DEVICES" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return [
        ProcessSpec(
            name=name,
            module=f"cosmos_core.{role}",
            arguments=("--run", str(job.directory), "--name", name, "--controller", address, *extra),
            environment={
                **thread_environment(threads[role]),
                **{name: value for name, value in _GPU_SETTINGS.items() if name not in os.environ},
                **order,
                **(allocator if role == "policy" else {}),
                "CUDA_VISIBLE_DEVICES": "" if on_cpu[role] else ",".join(itertools.islice(gpus[role], num_gpus[role])),
            },
        )
        for role, name, extra in names
    ]


def role_of(spec: ProcessSpec) -> Role:
    """The role of the replica that a process is of."""
    return "policy" if spec.module.endswith(".policy") else "rollout"


def replica_of(spec: ProcessSpec) -> str:
    """Name of the replica that a process is of."""
    return spec.name.partition(".")[0]


def _processes(replica: str, size: int) -> list[tuple[str, tuple[str, ...]]]:
    """Name and further arguments of each process of a replica."""
    if size == 1:
        return [(replica, ())]
    session = secrets.token_hex(8)
    return [
        (f"{replica}.{rank}" if rank else replica, ("--rank", str(rank), "--session", session)) for rank in range(size)
    ]


_GRACE_S: Final = 3.0
"""How long the processes of a replica may take to end once one of them has: they say why, and let go of the others."""


@attrs.define(kw_only=True)
class Member:
    """A replica as it was started last.

    Attributes:
        specs: Its processes, the leader's first.
        incarnation: The leader's, as the controller knows it.
        running: Names of the processes that have not ended.
        has_joined: Whether the controller took this incarnation in.
        killed: Names of the processes that were killed here: that a signal ended them tells nothing.
        first: How the process ended that ended first of its own accord, or for a reason from outside; if none did,
            that ended first. None while all run.
        given_up: Why the controller has given it up, if it was killed for that.
    """

    name: str
    specs: tuple[ProcessSpec, ...]
    incarnation: str = ""
    running: set[str] = attrs.field(factory=set)
    killed: set[str] = attrs.field(factory=set)
    has_joined: bool = False
    first: Exit | None = None
    given_up: str = ""
    ended_at: float = 0.0

    @property
    def end(self) -> Exit:
        """The exit of the process that ended first, of a replica that is gone."""
        assert self.first is not None, "it is gone"
        return self.first


class Fleet:
    """Starts replicas, whole, and tells which have ended, whole."""

    def __init__(self, launcher: Launcher, specs: Sequence[ProcessSpec]) -> None:
        self._launcher: Final = launcher
        self._members: Final[dict[str, Member]] = {}
        for name in dict.fromkeys(replica_of(spec) for spec in specs):
            self._members[name] = Member(name=name, specs=tuple(spec for spec in specs if replica_of(spec) == name))

    @property
    def names(self) -> Collection[str]:
        """The names of its replicas, without those that were forgotten."""
        return self._members.keys()

    def start_all(self) -> list[Member]:
        """Start every replica, and return them; raises ReplicaError if the system refused."""
        for member in self._members.values():
            self.start(member)
        return [*self._members.values()]

    def start(self, member: Member) -> None:
        """Start a replica, once more if it has ended: in new processes, which its earlier ones cannot be taken for."""
        session = secrets.token_hex(8)
        member.has_joined, member.first, member.given_up = False, None, ""
        member.killed.clear()
        for spec in member.specs:
            incarnation = secrets.token_hex(6)
            if spec is member.specs[0]:
                member.incarnation = incarnation
            # Of options that are given twice, the last counts.
            session_of = ("--session", session) if len(member.specs) > 1 else ()
            arguments = (*spec.arguments, *session_of, "--incarnation", incarnation)
            self._launcher.start(attrs.evolve(spec, arguments=arguments))
            member.running.add(spec.name)

    def note(self, ended: Exit, now: float) -> None:
        """Take in that a process has ended."""
        member = next((each for each in self._members.values() if ended.name in each.running), None)
        if member is None:
            return
        member.running.discard(ended.name)
        if member.first is None:
            member.first, member.ended_at = ended, now
        elif _is_ours(member, ended):
            return
        elif _is_ours(member, member.first) or _is_echo(member.first, ended, leader=member.name):
            member.first = ended

    def look(self, state: State) -> list[Member]:
        """Note who has joined; replicas that the controller has given up and that run all the same."""
        given_up = []
        for member in self._members.values():
            present = state.replicas.get(member.name)
            is_fenced = member.incarnation in state.fenced
            if is_fenced or (present is not None and present.incarnation == member.incarnation):
                member.has_joined = True
            if is_fenced and member.running and member.name not in state.departed:
                given_up.append(member)
        return given_up

    def give_up(self, member: Member, reason: str) -> None:
        """End a replica because the controller has given it up."""
        member.given_up = reason
        self.kill(member)

    def kill(self, member: Member) -> None:
        """End what runs of a replica, at once."""
        for name in member.running:
            member.killed.add(name)
            self._launcher.kill(name)

    def kill_absent(self, state: State) -> None:
        """End the replicas that never joined a run which is over: they have nothing to save."""
        self.look(state)
        for member in self._members.values():
            if not member.has_joined:
                self.kill(member)

    def gone(self, now: float) -> list[Member]:
        """Replicas of which nothing runs any more; of those that have begun to end, what lingers is killed."""
        for member in self._members.values():
            if member.first is not None and now - member.ended_at > _GRACE_S:
                self.kill(member)
        return [member for member in self._members.values() if member.first is not None and not member.running]

    def forget(self, member: Member) -> None:
        """Leave a replica that has ended alone from now on."""
        del self._members[member.name]


def _is_ours(member: Member, ended: Exit) -> bool:
    """True if a process ended because it was killed here."""
    return ended.name in member.killed and ended.code < 0


def _is_echo(earlier: Exit, later: Exit, *, leader: str) -> bool:
    """True if a process of a replica ended because of another one, though it was seen to end before that.

    A leader that ends without a failure was told of none: what the others ended with is what it told them.
    """
    if later.code < 0:
        return earlier.code == LOST
    return later.name == leader and later.code in {LOST, REFUSED} and earlier.code > 0
