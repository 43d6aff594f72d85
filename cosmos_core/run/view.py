"""What the live view shows, derived from a followed run."""

from __future__ import annotations

from typing import Final

from cosmos_core.config.stages import Stage
from cosmos_core.controller.live.phase import phase_of
from cosmos_core.controller.machine.records import EvaluationRecord
from cosmos_core.controller.machine.state import State
from cosmos_core.observe.live import Progress
from cosmos_core.run.follow import WINDOW_S, Follower, TimedStep

_NEWEST_STEPS: Final = 20


def progress_of(follower: Follower, stages: tuple[Stage, ...], *, now: float, elapsed_s: float) -> Progress:
    """The newest progress.

    Args:
        follower: The run so far.
        stages: Stages of the recipe.
        now: Unix time.
        elapsed_s: Seconds since the start, as people count them.
    """
    state = follower.state
    if state is None:
        return starting(stages, 0, elapsed_s=elapsed_s)
    stage = stages[state.stage_index]
    newest = [timed.record for timed in follower.steps[-_NEWEST_STEPS:] if timed.record.stage == stage.index]
    rewarded = [record for record in newest if record.reward is not None]
    timed_steps = follower.newest_steps(stage.index)
    scored = _newest(follower, "accuracy")
    measured = _newest(follower, "loss")
    uses_rollouts = state.settings.stages[stage.index].uses_rollouts
    return Progress(
        phase=phase_of(state, stage),
        step=state.step,
        num_steps=stages[-1].last_step,
        stage=stage.plugin,
        elapsed_s=elapsed_s,
        reward=sum(record.reward or 0.0 for record in rewarded) / len(rewarded) if rewarded else None,
        accuracy=scored.accuracy if scored else None,
        evaluated_step=scored.version if scored else None,
        heldout_loss=measured.loss if measured else None,
        measured_step=measured.version if measured else None,
        staleness=sum(record.staleness_mean for record in rewarded) / len(rewarded) if rewarded else None,
        policy_units_per_s=_rate(follower, timed_steps, now),
        rollout_units_per_s=follower.generated_per_s(now) or None,
        dropped=sum(sum(ledger.dropped.values()) for ledger in state.ledgers),
        queued=len(state.ledger.finished) + len(state.ledger.claimed) if uses_rollouts else None,
        in_flight=len(state.ledger.in_flight) if uses_rollouts else None,
        restarts=follower.restarts.total(),
        eta_s=None if state.outcome or stage.index < len(stages) - 1 else _eta(timed_steps, stage),
    )


def starting(stages: tuple[Stage, ...], step: int, *, elapsed_s: float) -> Progress:
    """Progress before anything is known of this session: figures of an earlier one would look like this one's.

    Args:
        stages: Stages of the recipe.
        step: The session goes on from.
        elapsed_s: Seconds since the start, as people count them.
    """
    stage = next((stage for stage in stages if step < stage.last_step), stages[-1])
    last_step = stages[-1].last_step
    return Progress(phase="starting", step=step, num_steps=last_step, stage=stage.plugin, elapsed_s=elapsed_s)


def waits_for(state: State | None) -> str:
    """What a requested stop waits for."""
    if state is None or not state.has_started:
        return "the replicas to start"
    if state.running is not None:
        return f"step {state.running.order.step} to be applied, and its checkpoint"
    return f"a checkpoint of step {state.step}"


def _newest(follower: Follower, name: str) -> EvaluationRecord | None:
    """The newest evaluation that has a figure."""
    records = (timed.record for timed in reversed(follower.evaluations))
    return next((record for record in records if getattr(record, name) is not None), None)


def _rate(follower: Follower, newest: list[TimedStep], now: float) -> float | None:
    """Trained units per second; None once no step has ended for as long as the rate is measured over."""
    if not newest or now - newest[-1].time > max(WINDOW_S, newest[-1].time - newest[0].time):
        return None
    return follower.trained_per_s(newest)


def _eta(newest: list[TimedStep], stage: Stage) -> float | None:
    """Seconds to the stage's end at the pace of its newest steps."""
    if len(newest) < 2:
        return None
    pace = (newest[-1].time - newest[0].time) / (len(newest) - 1)
    return pace * max(0, stage.last_step - newest[-1].record.step)
