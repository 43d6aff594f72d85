"""Who denoises and who waits; samples that branch from another's state wait for it to get there."""

from __future__ import annotations

from collections.abc import Iterable

from cosmos_core.rollout.diffusion.trajectory import DenoisingFlight, Trajectory
from cosmos_core.rollout.serving.waiting import Waiting


class DenoisingQueue:
    """Lets waiting samples in, in order of priority, then of arrival (`serving.SampleQueue`).

    Attributes:
        version: Of the weights.
        running: Samples that denoise.
    """

    def __init__(self, *, num_slots: int) -> None:
        self._num_slots = num_slots
        self._waiting: Waiting[Trajectory] = Waiting()
        self._following: list[Trajectory] = []
        self.running: list[Trajectory] = []
        self.version = 0

    @property
    def num_running(self) -> int:
        """Samples that denoise."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Samples not started."""
        return len(self._waiting) + len(self._following)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self._waiting)

    def add(self, samples: Iterable[Trajectory], /) -> None:
        """Let samples wait."""
        for sample in samples:
            if sample.follows:
                self._following.append(sample)
            else:
                self._waiting.add([sample])

    def part(self, flight: DenoisingFlight) -> None:
        """The state that the samples of a request branch from is there."""
        ready = [sample for sample in self._following if sample.flight is flight]
        self._following = [sample for sample in self._following if sample.flight is not flight]
        self._waiting.add(ready)

    def admit(self) -> list[Trajectory]:
        """Let in as many as there is room for; all that denoise now."""
        while self._waiting and len(self.running) < self._num_slots:
            self.running.append(self._waiting.take())
        return list(self.running)

    def remove(self, finished: Iterable[Trajectory], /) -> None:
        """Take samples out, running or waiting."""
        gone = set(finished)
        self.running = [sample for sample in self.running if sample not in gone]
        self._following = [sample for sample in self._following if sample not in gone]
        self._waiting.remove(gone)
