"""Admission of sequences to vLLM; the others wait outside it: it is only ever given what it can start at once.

So nothing waits in there with a prompt that was keyed to weights of before an update, and priorities hold.
"""

from __future__ import annotations

from collections.abc import Iterable

from cosmos_core.rollout.serving.requests import WaitingQueue
from cosmos_core.rollout.serving.tokens import TokenSequence
from cosmos_engine_vllm.backend import Backend

_SEEDS = (1 << 63) - 1


class Admission:
    """Lets waiting samples in, in order of priority, then of arrival (`serving.SampleQueue`)."""

    def __init__(self, backend: Backend, *, num_slots: int) -> None:
        self._backend = backend
        self._num_slots = num_slots
        self._waiting: WaitingQueue[TokenSequence] = WaitingQueue()
        self._running: dict[str, TokenSequence] = {}
        self._epoch = 0
        self.version = 0

    @property
    def num_running(self) -> int:
        """Samples in vLLM."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Samples not started."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return bool(self._running or self._waiting)

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        """Let samples wait."""
        self._waiting.add(sequences)

    def admit(self) -> None:
        """Give vLLM as many as it has room for."""
        while self._waiting and len(self._running) < self._num_slots:
            self._enter(self._waiting.take())

    def _enter(self, sequence: TokenSequence) -> None:
        parent = sequence.parent
        sequence.mark(self.version)
        name = self._backend.add(
            parent.prompt,
            parent.request.sampling,
            seed=sequence.key & _SEEDS,
            epoch=self._epoch,
            shows=parent.conditioning,
        )
        self._running[name] = sequence

    def of(self, name: str) -> TokenSequence | None:
        """The sample of a name in vLLM; None if it was taken out."""
        return self._running.get(name)

    def remove(self, finished: Iterable[TokenSequence]) -> None:
        """Take samples out, running or waiting."""
        gone = set(finished)
        names = [name for name, sequence in self._running.items() if sequence in gone]
        for name in names:
            del self._running[name]
        self._backend.drop(names)
        self._waiting.remove(gone)

    def mark(self, version: int) -> None:
        """Tokens generated from now on come of `version`; sequences without any yet start anew."""
        self.version = version
        self._epoch += 1
        for name, sequence in list(self._running.items()):
            sequence.mark(version)
            if not sequence.num_generated:
                del self._running[name]
                self._backend.drop([name])
                self._enter(sequence)
