"""The time that a run has taken: seconds by activity of each pool, over all that its journal tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from cosmos_core.control.machine.events import ControllerStarted, Event, ReplicaJoined, Resumed
from cosmos_core.control.machine.state import State
from cosmos_core.transport.reports import GroupFinished, Report, WeightsLoaded

Planes = dict[str, dict[str, float]]
"""{pool: {activity: seconds}}."""

POLICY: Final[Mapping[str, tuple[str, ...]]] = {
    "training": ("pack_s", "forward_backward_s", "optimizer_s"),
    "sample fetch": ("fetch_s",),
    "gradient exchange": ("reduce_s",),
    "weight publish": ("publish_s",),
    "held-out loss": ("heldout_s",),
    "waiting for samples": ("wait_s",),
}
"""Activity to the step metrics that it is the sum of; of several replicas, a metric is the slowest one's."""

_GENERATION: Final = "generation"
_SCORING: Final = "scoring (summed over concurrent requests)"
_AWAITED: Final = "waiting for scores"
_LOAD: Final = "weight load"
_PAUSED: Final = "paused for weights"


class TimeSpent:
    """Adds up what was told of time in all sessions, what was undone included; time between sessions does not count.

    The policy's seconds are summed over steps; the rollout's are the mean of its replicas. In a warm-up, they wait for
    no prompts, as there are none: that time is told apart.
    """

    def __init__(self) -> None:
        self._policy: Final[defaultdict[str, float]] = defaultdict(float)
        self._rollout: Final[defaultdict[str, float]] = defaultdict(float)
        self._present_s: Final = {True: 0.0, False: 0.0}  # by whether the stage has rollouts
        self._names: Final[set[str]] = set()
        self._told: Final[dict[str, tuple[float, float]]] = {}
        self._last = 0.0

    def take(self, time: float, event: Event, state: State) -> None:
        """Take in an entry that the state has not taken in yet: who was there until then."""
        if isinstance(event, ReplicaJoined) and event.role == "rollout":
            self._names.add(event.name)
        if not isinstance(event, ControllerStarted | Resumed):
            self._present_s[state.stage.uses_rollouts] += (time - self._last) * len(state.members["rollout"])
        self._last = time

    def take_report(self, incarnation: str, report: Report) -> None:
        """Take in a report of a rollout replica, which comes once."""
        if isinstance(report, WeightsLoaded):
            self._rollout[_LOAD] += report.transfer_s
            self._rollout[_PAUSED] += report.paused_s
        elif isinstance(report, GroupFinished):
            busy_s, scoring_s = self._told.get(incarnation, (0.0, 0.0))
            self._rollout[_GENERATION] += report.busy_s - busy_s
            self._rollout[_SCORING] += report.scoring_s - scoring_s
            self._rollout[_AWAITED] += report.awaited_s
            self._told[incarnation] = report.busy_s, report.scoring_s

    def take_step(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a step, each time that it is applied."""
        if "wait_s" in metrics:
            for activity, names in POLICY.items():
                self._policy[activity] += sum(metrics.get(name, 0.0) for name in names)

    @property
    def generation_s(self) -> float:
        """Seconds of generation, summed over replicas."""
        return self._rollout[_GENERATION]

    def planes(self) -> Planes:
        """Seconds by activity of each pool; without one of which nothing is known."""
        found: dict[str, Mapping[str, float]] = {}
        if self._names:
            waiting_s = self._present_s[True] - sum(self._rollout[name] for name in (_GENERATION, _PAUSED, _AWAITED))
            known = {name: self._rollout[name] for name in (_GENERATION, _SCORING, _AWAITED, _LOAD, _PAUSED)}
            parts = known | {"waiting for prompts": max(0.0, waiting_s)}
            parts |= {"idle in the warm-up": self._present_s[False]} if self._present_s[False] else {}
            found["rollout"] = {name: value / len(self._names) for name, value in parts.items()}
        if self._policy:
            found["policy"] = self._policy
        return {pool: {name: round(value, 3) for name, value in parts.items()} for pool, parts in found.items()}
