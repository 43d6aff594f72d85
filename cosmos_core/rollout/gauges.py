"""What a rollout replica shows of itself with each beat."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from cosmos_core.protocols import RolloutEngine
from cosmos_core.replica.activity import Pulse
from cosmos_core.rollout.gate import VersionGate
from cosmos_core.rollout.generation import Generation
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.rollout.weights_sync import WeightSync
from cosmos_core.transport.payloads import PayloadServer

_WINDOW_S: Final = 5.0


class Gauges:
    """Reads all parts; called on the control line's thread."""

    def __init__(
        self, engine: RolloutEngine, pool: RewardPool, payloads: PayloadServer, sync: WeightSync, gate: VersionGate
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._payloads = payloads
        self._sync = sync
        self._gate = gate
        self._recent: deque[tuple[float, int]] = deque()

    def __call__(self) -> dict[str, float]:
        """Name to value."""
        stats = self._engine.stats()
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "generated_units": stats.generated_units,
            "prompt_units": stats.prompt_units,
            "units_per_s": self._rate(stats.generated_units),
            "busy_s": stats.busy_s,
            "paused_s": stats.paused_s,
            "scoring_s": self._pool.scoring_s,
            "weight_version": self._gate.loaded,
            "transfer_s": self._sync.transfer_s,
            "held": len(self._payloads.held),
        }

    def _rate(self, generated: int) -> float:
        """Units a second over the last seconds."""
        now = time.monotonic()
        self._recent.append((now, generated))
        while len(self._recent) > 2 and now - self._recent[1][0] >= _WINDOW_S:
            self._recent.popleft()
        since, before = self._recent[0]
        return (generated - before) / (now - since) if now > since else 0.0


class Vitals:
    """What the replica is doing and whether it gets on, from all of its parts; called on the control line's thread."""

    def __init__(self, engine: RolloutEngine, pool: RewardPool, sync: WeightSync, generation: Generation) -> None:
        self._engine = engine
        self._pool = pool
        self._sync = sync
        self._generation = generation

    def __call__(self) -> Pulse:
        """The pulse."""
        stats, loading, active = self._engine.stats(), self._sync.loading, self._generation.num_active
        doing = f"working on {active} prompts" if active else ""
        if loading >= 0:
            doing = f"loading weights version {loading}"
        units = stats.generated_units + stats.prompt_units
        return Pulse(
            progress=units + self._sync.num_pieces + self._generation.num_ended + round(1000 * self._pool.scoring_s),
            doing=doing,
        )
