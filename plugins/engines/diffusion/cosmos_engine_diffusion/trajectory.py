"""Samples in flight: a state on its way from noise to data, and the decisions that were taken.

Shape legend: N decisions, M states that are kept, C channels, T latent frames, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import torch

from cosmos_core.protocols import FinishReason, Generated
from cosmos_core.protocols.world import LatentSpec
from cosmos_core.rollout.serving.requests import RequestState, WaitingQueue
from cosmos_core.types import Array, Payload
from cosmos_engine_diffusion.samplers import Step
from cosmos_engine_diffusion.schedule import Schedule, noise


@attrs.frozen(kw_only=True, eq=False)
class Decision:
    """A transition that was drawn.

    Attributes:
        step: The sampler's.
        before: x_t, float32 [C, T, H, W] on the CPU.
        after: x', likewise.
        offset: What the sampler history adds to the mean, likewise; None for nothing.
        logprob: Of x'.
        version: Of the weights that gave the velocity.
    """

    step: Step
    before: torch.Tensor
    after: torch.Tensor
    offset: torch.Tensor | None
    logprob: float
    version: int


@attrs.define(eq=False)
class Trajectory:
    """One sample of a request.

    Attributes:
        parent: Its request.
        index: Its place among the request's samples.
        at: The step to be taken next.
        state: x_t, float32 [C, T, H, W]; None before it begins.
        history: What the sampler remembers of the steps before, likewise.
        decisions: What was decided so far.
        versions: Weight versions of the steps taken, each once; once it is at its end, those of what is learned of it.
        finished: The payload of all of it, once it is at its end.
        media: What it looks like.
        reason: Why it ended; None while it goes on.
    """

    parent: DenoisingRequestState
    index: int
    at: int = 0
    state: torch.Tensor | None = None
    history: Sequence[torch.Tensor] = ()
    decisions: list[Decision] = attrs.field(factory=list)
    versions: set[int] = attrs.field(factory=set)
    finished: Payload | None = None
    media: Payload | None = None
    reason: FinishReason | None = None

    @property
    def step(self) -> Step:
        """The step to be taken next."""
        return self.parent.schedule.discretization.steps[self.at]

    @property
    def goes_on(self) -> bool:
        """True if the step before it was a decision, too."""
        return bool(self.decisions) and self.at - 1 in self.parent.schedule.decided

    @property
    def follows(self) -> bool:
        """True while it waits for another sample to reach the state that it branches from."""
        return self.index > 0 and self.parent.schedule.branch > 0 and self.parent.prefix is None

    def start(self, device: torch.device) -> None:
        """Be at the first state: noise, or where the samples of its group part."""
        if self.state is not None:
            return
        parent, prefix = self.parent, self.parent.prefix
        if self.index and prefix is not None:
            self.at, self.state, self.history = parent.schedule.branch, prefix.state, prefix.history
            return
        latent_spec = parent.latent_spec
        drawn_as = 0 if parent.schedule.shares_noise else self.index
        first = parent.schedule.discretization.start * noise(parent.request.seed, drawn_as, -1, latent_spec.shape)
        self.state = latent_spec.with_given(first).to(device)

    def fresh(self) -> torch.Tensor:
        """The noise of the step to be taken next, float32 [C, T, H, W] on the CPU."""
        return noise(self.parent.request.seed, self.index, self.at, self.parent.latent_spec.shape)

    def generated(self, version: int) -> Generated:
        """The result, partial if it was aborted; `version` stands in where no step was taken."""
        payload = self.finished
        if payload is None:
            payload = attrs.evolve(self.parent.request.prompt, arrays=self.arrays())
        number = payload.arrays["logprobs"].shape[0]
        versions = self._versions() or {version}
        return Generated(
            payload=payload,
            reason=self.reason or FinishReason.ABORTED,
            oldest_version=min(versions),
            newest_version=max(versions),
            num_units=number,
            media=self.media,
        )

    def end(self, media: Payload) -> None:
        """Be at the end: of the way there, only what `finished` has of it is kept."""
        self.media, self.reason, self.versions = media, FinishReason.STOP, self._versions()
        self.state, self.history, self.decisions = None, (), []

    def _versions(self) -> set[int]:
        # A sample that is learned as a whole is of all weights that had a part in it.
        return {each.version for each in self.decisions} or self.versions

    def arrays(self) -> dict[str, Array]:
        """The prompt's arrays, and those of the transitions (see `cosmos_core.types.Payload`)."""
        states, places = self._states()
        shape, steps = self.parent.latent_spec.shape, [each.step for each in self.decisions]
        rows = np.array([(each.of_state, each.of_velocity, each.std) for each in steps], np.float32).reshape(-1, 3)
        found = {
            **self.parent.request.prompt.arrays,
            "states": array(torch.stack(states) if states else torch.zeros(0, *shape)),
            "places": _numpy_array(np.array(places, np.int32).reshape(-1, 2)),
            "steps": _numpy_array(rows),
            "times": _numpy_array(np.array([each.time for each in steps], np.float32)),
            "guidance": _numpy_array(np.array(self.parent.guidance, np.float32)),
            "logprobs": _numpy_array(np.array([each.logprob for each in self.decisions], np.float32)),
            "versions": _numpy_array(np.array([each.version for each in self.decisions], np.int32)),
        }
        if any(each.offset is not None for each in self.decisions):
            none = torch.zeros(shape)
            found["offsets"] = array(
                torch.stack([none if each.offset is None else each.offset for each in self.decisions])
            )
        return found

    def _states(self) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
        """Each state once, and which two each decision leads from and to."""
        states: list[torch.Tensor] = []
        places = []
        for each in self.decisions:
            if not states or states[-1] is not each.before:
                states.append(each.before)
            states.append(each.after)
            places.append((len(states) - 2, len(states) - 1))
        return states, places


@attrs.define(eq=False)
class DenoisingRequestState(RequestState[Trajectory]):
    """A request for denoised samples in flight; `prefix` is where its samples part, once there."""

    latent_spec: LatentSpec
    schedule: Schedule
    guidance: float
    prefix: Prefix | None = attrs.field(init=False, default=None)

    def begin(self, index: int) -> Trajectory:
        """Sample `index`, of which no step is taken."""
        return Trajectory(self, index)


@attrs.frozen(eq=False)
class Prefix:
    """The state, float32 [C, T, H, W], and the sampler's history where the samples of a group part."""

    state: torch.Tensor
    history: Sequence[torch.Tensor]


def array(tensor: torch.Tensor) -> Array:
    """A tensor as payloads hold it."""
    return _numpy_array(tensor.detach().cpu().contiguous().numpy())


def _numpy_array(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Array:
    return Array(dtype=str(values.dtype), shape=values.shape, data=np.ascontiguousarray(values).tobytes())


class DenoisingQueue:
    """Lets waiting samples in, in order of priority, then of arrival (`serving.SampleQueue`)."""

    def __init__(self, *, num_slots: int) -> None:
        self._num_slots = num_slots
        self._waiting: WaitingQueue[Trajectory] = WaitingQueue()
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
        """True if a step would do anything."""
        return bool(self.running or self._waiting)

    def add(self, samples: Iterable[Trajectory], /) -> None:
        """Let samples wait."""
        for sample in samples:
            if sample.follows:
                self._following.append(sample)
            else:
                self._waiting.add([sample])

    def part(self, parent: DenoisingRequestState) -> None:
        """The state that the samples of a request branch from is there."""
        ready = [sample for sample in self._following if sample.parent is parent]
        self._following = [sample for sample in self._following if sample.parent is not parent]
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
