"""The ranks after the first, as the first one leads them: started, told what to do, watched, ended."""

from __future__ import annotations

import contextlib
import queue
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from cosmos_core.errors import EngineError, EngineLostError, TransportError
from cosmos_core.protocols import EngineContext
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.rollout.embedded.ranks import mesh as ranks_mesh
from cosmos_core.rollout.embedded.ranks.messages import Built, Failed, Join, Loaded, Ready, Setup, Share
from cosmos_core.rollout.embedded.ranks.process import Ended, RankProcess
from cosmos_core.rollout.serving.commands import LostProcessError
from cosmos_core.weights.shards import dtype_name

T = TypeVar("T")

_START_S: Final = 300.0
"""Time to import torch and make the model plugin."""
_BUILD_S: Final = 1800.0
"""Time to read a rank's part of a checkpoint, after the first rank has read its own."""
_ANSWER_S: Final = 300.0
_JOIN_S: Final = 5.0
_DEATH_S: Final = 5.0
"""How long the end of a rank may take to be seen, once a collective with it has failed."""


class Team:
    """Ranks 1 and up of one engine.

    Methods are called on the engine's thread; `lost` is called on a thread of its own.

    Args:
        context: The engine's.
        options: The engine's.
        lost: Told once, when a rank ends before `close`.

    Raises:
        EngineError: The context does not let other processes make the model.
    """

    def __init__(self, context: EngineContext, options: EmbeddedOptions, lost: Callable[[EngineError], None]) -> None:
        self._context: Final = context
        self._options: Final = options
        self._lost: Final = lost
        self._size: Final = context.tensor_parallel
        self._processes: Final[list[RankProcess]] = []
        self._answers: Final[dict[int, queue.SimpleQueue[object]]] = {}
        self._may_join = self._has_joined = False
        self._closing = False
        self._failure: EngineError | None = None
        self._failed: Final = threading.Event()
        self._watcher: threading.Thread | None = None
        if context.source is None:
            raise EngineError(
                f"rollout.mesh.tp: {self._size} ranks, but nothing says how another process makes the model "
                "(EngineContext.source); set tp = 1"
            )

    def form(self) -> ranks_mesh.TensorMesh:
        """Start the ranks and become the first of them.

        Raises:
            EngineError: This process cannot be a rank.
            LostProcessError: One did not start, or ended.
        """
        ranks_mesh.check_devices(self._context.device.type, self._size)
        store = ranks_mesh.host_store()
        for rank in range(1, self._size):
            self._answers[rank] = queue.SimpleQueue()
            self._processes.append(RankProcess(rank))
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()
        for process in self._processes:
            process.send(self._setup(process.rank))
        self.collect(Ready, _START_S)
        self.tell(Join(port=int(store.port)))
        device = ranks_mesh.device_of(self._context.device.type, 0)
        self._may_join = True
        mesh = ranks_mesh.join(store, rank=0, size=self._size, device=device)
        self._has_joined = True
        return mesh

    def places(self) -> dict[int, Mapping[str, Share]]:
        """Where the parts of each rank lie, once they have built them.

        Raises:
            LostProcessError: One ended, or did not build its part in time.
        """
        return {rank: built.shares for rank, built in self.collect(Built, _BUILD_S).items()}

    def loaded(self) -> dict[int, Loaded]:
        """What each rank holds, once it has loaded what it was told to.

        Raises:
            LostProcessError: One ended, or did not answer in time.
        """
        return self.collect(Loaded, _ANSWER_S)

    def tell(self, message: object) -> None:
        """Tell all ranks the same.

        Raises:
            LostProcessError: One has ended, or does not listen.
        """
        for process in self._processes:
            self.tell_one(process.rank, message)

    def tell_one(self, rank: int, message: object, descriptor: int | None = None) -> None:
        """Tell a rank something, with a descriptor if there is one.

        Raises:
            LostProcessError: It has ended, or does not listen.
        """
        try:
            self._processes[rank - 1].send(message, descriptor)
        except EngineLostError as error:
            raise LostProcessError(self.failure() or error) from error

    def collect(self, kind: type[T], timeout_s: float) -> dict[int, T]:
        """The next answer of each rank.

        Raises:
            LostProcessError: One ended, or did not answer in time: its answer, if it came later, would be taken for
                that to another question.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, T] = {}
        for rank, answers in self._answers.items():
            try:
                answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                silent = EngineLostError(f"rank {rank} of the engine did not answer within {timeout_s:g} s")
                raise LostProcessError(silent) from None
            if isinstance(answer, EngineError):
                raise LostProcessError(answer) from answer
            assert isinstance(answer, kind), f"rank {rank} answered {answer!r} where a {kind.__name__} was due"
            found[rank] = answer
        return found

    def failure(self) -> EngineError | None:
        """How the first rank ended that did, once something that all do together has failed; None if none has."""
        return self._failure if self._failed.wait(_DEATH_S) else None

    def close(self) -> None:
        """End all ranks, and be one no more. Idempotent."""
        self._closing = True
        for process in self._processes:
            process.hang_up()
        if self._has_joined:
            self._has_joined = False
            with contextlib.suppress(RuntimeError):  # the others may be gone
                ranks_mesh.leave()
        for process in self._processes:
            # At once: it has nothing to save, and an interpreter takes its time to leave.
            process.end(0.0)
        if self._watcher is not None:
            self._watcher.join(_JOIN_S)
        for process in self._processes:
            process.socket.close()
        self._processes.clear()

    def _setup(self, rank: int) -> Setup:
        context, source = self._context, self._context.source
        assert source is not None
        return Setup(
            rank=rank,
            size=self._size,
            plugin=source.plugin,
            model_options=dict(source.options),
            path=source.context.path,
            config=None if source.context.config is None else dict(source.context.config),
            assets=str(source.context.assets),
            trust_remote_code=source.context.trust_remote_code,
            seed=context.seed,
            dtype=dtype_name(context.dtype),
            device=context.device.type,
            max_in_flight=context.max_in_flight,
            context_length=context.context_length,
            threads=torch.get_num_threads(),
            options=self._options,
        )

    def _watch(self) -> None:
        """Take answers until every rank has ended or one has failed."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.socket, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    spoken: RankProcess = key.data
                    end = self._take(spoken)
                    if end is not None:
                        selector.unregister(spoken.socket)
                        self._note(spoken, end)

    def _take(self, process: RankProcess) -> Ended | None:
        """Pass on what a rank says; how it ended, if it is of no use any more."""
        try:
            for message in process.receive():
                if isinstance(message, Failed):
                    return Ended(how=message.reason, is_killed=False)
                self._answers[process.rank].put(message)
        except EOFError:
            return Ended(how="", is_killed=False) if self._closing else process.end(_DEATH_S)
        except (TransportError, OSError) as error:
            return Ended(how=f"what it says cannot be read: {error}", is_killed=False)
        return None

    def _note(self, process: RankProcess, end: Ended) -> None:
        if self._closing or self._failure is not None:
            return
        kind = EngineLostError if end.is_killed else EngineError
        self._failure = kind(f"rank {process.rank} of the {self._size} ranks of the engine ended: {end.how}")
        self._failed.set()
        for answers in self._answers.values():
            answers.put(self._failure)
        if self._context.device.type == "cuda" and self._may_join and dist.is_initialized():
            # A collective that waits on a GPU for a rank that is gone would wait until its own time limit.
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - the only way
        self._lost(self._failure)
