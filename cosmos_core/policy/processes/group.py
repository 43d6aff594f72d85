"""The gradient group of a generation: the replicas that train a step together, and their collectives.

Each replica is its own world; the group is a process group built for one generation, outside `torch.distributed`'s
default group, so replicas come and go. Of replicas of several processes, those of equal rank form a group each. A
collective that fails on any of them, or that a newer generation makes pointless, raises `GradientGroupError` on every
process of the replica: the step's gradients are then partial and must be discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import attrs
import msgspec
import torch
import torch.distributed as dist

from cosmos_core.errors import TrainingError
from cosmos_core.models.parallel.channel import all_gathered
from cosmos_core.policy.processes.backend import Collectives, give_up
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.replica.activity import Activity
from cosmos_core.weights.process_group import aside, finish


class GradientGroupError(TrainingError):
    """The gradient group could not be formed or broke."""


@attrs.define(kw_only=True, eq=False, slots=False)
class GradientGroup:
    """The members of one generation, in rank order. A group of one needs no network.

    All processes of a replica call each method, in the same order, and it succeeds on all or on none.

    Attributes:
        generation: Its number.
        rank: This replica's place.
        size: Number of members.
        backend: The process group; None for a group of one.
        device: Where the backend takes tensors.
        interrupted: Whether waiting has become pointless (a newer generation, the end of the process).
        world: The processes of this replica.
        activity: Told when this replica waits for others.
    """

    generation: int
    rank: int
    size: int
    _backend: Collectives | None
    _device: torch.device
    _interrupted: Callable[[], bool]
    _world: World = attrs.field(factory=single_world)
    _activity: Activity = attrs.field(factory=Activity)

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all members, in place.

        Raises:
            GradientGroupError: The group broke.
        """
        self._together(lambda: self._run(lambda backend: backend.allreduce([tensor])))

    def copy(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """Overwrite tensors with those of member `source`; those that wait on another device go through the group's.

        Raises:
            GradientGroupError: The group broke.
        """
        options = dist.BroadcastOptions()
        options.rootRank = source

        def start(tensor: torch.Tensor) -> Callable[[Collectives], dist.Work]:
            return lambda backend: backend.broadcast([tensor], options)

        def copy_all() -> None:
            for tensor in tensors:
                here = tensor.to(self._device)
                self._run(start(here))
                if here is not tensor:
                    tensor.copy_(here)

        self._together(copy_all)

    def exchange(self, data: bytes) -> list[bytes]:
        """Give the bytes of each member's leader to every process of every member, in rank order.

        Raises:
            GradientGroupError: The group broke.
        """
        answers = [data]

        def exchange() -> None:
            if self._world.is_leader:
                answers[:] = all_gathered(data, self._gather)

        self._together(exchange)
        if self._world.size == 1:
            return answers
        shared = self._world.share(msgspec.msgpack.encode(answers))
        return msgspec.msgpack.decode(shared, type=list[bytes])

    def close(self) -> None:
        """Leave the group."""
        backend, self._backend = self._backend, None
        if backend is not None and self._device.type == "cuda":
            backend.abort()

    def _together(self, work: Callable[[], None]) -> None:
        """Do what every process of the replica does with those of its rank elsewhere, and agree whether it worked.

        A rank whose own group is fine must not apply what another's could not reduce.
        """
        if self.size == 1:
            return
        problem: GradientGroupError | None = None
        waiting = f"waiting for the other members of generation {self.generation}"
        with self._activity.doing(waiting, waits=True):
            try:
                work()
            except GradientGroupError as error:
                problem = error
        # The leader goes on looking out for newer generations: a rank that still waits needs to be told. Once it has
        # been, it is this replica's own fault if it does not come back.
        with self._activity.doing(waiting, waits=problem is None):
            is_good = self._world.agree(problem is None, self._interrupted)
        if not is_good:
            self._give_up()
            raise problem or GradientGroupError(
                f"generation {self.generation}: a collective failed in another process of this replica"
            )

    def _gather(self, data: bytearray) -> list[bytes]:
        """Bytes of equal size from every member, in rank order."""
        tensor = torch.frombuffer(data, dtype=torch.uint8).to(self._device)
        outputs = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(lambda backend: backend.allgather([outputs], [tensor]))
        return [output.cpu().numpy().tobytes() for output in outputs]

    def _run(self, start: Callable[[Collectives], dist.Work]) -> None:
        """Do a collective, and wait for it."""
        if self._backend is None:
            raise GradientGroupError(f"generation {self.generation}: the group is closed")
        pause_s = 0.0

        def pause() -> None:
            nonlocal pause_s
            if pause_s > 0.01 and self._interrupted():
                self._give_up()
                raise GradientGroupError(f"generation {self.generation}: interrupted in a collective")
            time.sleep(pause_s)
            pause_s = min(0.02, pause_s + 0.0001)

        try:
            finish(start(self._backend), self._backend, aside(self._device), pause)
        except RuntimeError as error:
            self._give_up()
            reason = str(error).strip().split("\n", 1)[0]
            raise GradientGroupError(f"generation {self.generation}: a collective failed: {reason}") from error

    def _give_up(self) -> None:
        """Leave at once."""
        backend, self._backend = self._backend, None
        give_up(backend, self._device)


def solo(generation: int = 0, world: World | None = None) -> GradientGroup:
    """A group of one."""
    return GradientGroup(
        generation=generation,
        rank=0,
        size=1,
        backend=None,
        device=torch.device("cpu"),
        interrupted=lambda: False,
        world=single_world() if world is None else world,
    )
