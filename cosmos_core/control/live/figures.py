"""The figures of a run at one moment. The terminal, `cosmos status`, its `--watch` and the page all show these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from cosmos_core.config.stages import Stage
from cosmos_core.control.live.timeline import TimedStep, Timeline
from cosmos_core.control.machine.records import EvaluationRecord
from cosmos_core.control.machine.state import State
from cosmos_core.observe.live import Progress


def phase_of(state: State, stage: Stage) -> str:
    """The phase of the run, in a few words.

    Args:
        state: The run's.
        stage: The stage of its next step.
    """
    evaluates_first = state.pending and state.running is None and not state.steps[stage.first_step :]
    phases = (
        (bool(state.outcome), state.outcome),
        (state.is_stopping, "stopping"),
        (not state.has_started, "starting"),
        (state.is_trained, "last evaluation" if state.pending else "last checkpoint"),
        (stage.key == "warmup", "warm-up"),
        (bool(evaluates_first), "evaluating"),
    )
    return next((phase for holds, phase in phases if holds), "training")


NEWEST_STEPS: Final = 20
_WINDOW_S: Final = 10.0
"""A rate is measured over at least so long before it counts as gone."""

Gauges: TypeAlias = Mapping[str, Mapping[str, float]]
"""The newest gauges of each replica by name, and of the controller under `controller`."""


def figures(
    state: State, timeline: Timeline, stages: tuple[Stage, ...], gauges: Gauges, *, now: float | None
) -> Progress:
    """The figures of a run.

    Args:
        state: The run's; only read.
        timeline: When it came to that.
        stages: Stages of the recipe.
        gauges: What its processes said last.
        now: Unix time; None for a run that nobody runs now, which has no pace.
    """
    stage = stages[state.stage_index]
    records = [record for record in state.steps[-NEWEST_STEPS:] if record.stage == stage.index]
    rewarded = [record for record in records if record.reward is not None]
    newest = timeline.newest_steps(stage.index)
    scored, measured = _newest(state, of_rollouts=True), _newest(state, of_rollouts=False)
    uses_rollouts = state.settings.stages[stage.index].uses_rollouts
    is_last = stage.index == len(stages) - 1
    is_running = now is not None and not state.outcome
    return Progress(
        phase=phase_of(state, stage),
        step=state.step,
        num_steps=stages[-1].last_step,
        stage=stage.plugin,
        elapsed_s=timeline.elapsed_s(None if state.has_ended else now),
        reward=sum(record.reward or 0.0 for record in rewarded) / len(rewarded) if rewarded else None,
        accuracy=scored.accuracy if scored else None,
        heldout_reward=scored.score if scored and scored.accuracy is None else None,
        evaluated_step=scored.version if scored else None,
        heldout_loss=measured.loss if measured else None,
        measured_step=measured.version if measured else None,
        staleness=sum(record.staleness_mean for record in rewarded) / len(rewarded) if rewarded else None,
        policy_units_per_s=_trained_per_s(timeline, newest, now) if now is not None else None,
        rollout_units_per_s=_generated_per_s(state, gauges) if is_running else None,
        dropped=sum(sum(ledger.dropped.values()) for ledger in state.ledgers),
        queued=len(state.ledger.finished) + len(state.ledger.batched) if uses_rollouts else None,
        in_flight=len(state.ledger.in_flight) if uses_rollouts else None,
        restarts=timeline.restarts.total(),
        eta_s=_eta(newest, stage) if is_running and is_last else None,
        unit=state.settings.unit,
    )


def _newest(state: State, *, of_rollouts: bool) -> EvaluationRecord | None:
    """The newest evaluation of rollouts, or of demonstrations."""
    return next((done for done in reversed(state.evaluations) if done.is_of_rollouts == of_rollouts), None)


def _trained_per_s(timeline: Timeline, newest: list[TimedStep], now: float) -> float | None:
    """Units trained per second; None once no step has ended for as long as the rate is measured over."""
    if not newest or now - newest[-1].time > max(_WINDOW_S, newest[-1].time - newest[0].time):
        return None
    return timeline.trained_per_s(newest)


def _generated_per_s(state: State, gauges: Gauges) -> float | None:
    """Units that rollout replicas generate per second, by their own words."""
    rates = [gauges.get(name, {}).get("units_per_s") for name in state.members["rollout"]]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _eta(newest: list[TimedStep], stage: Stage) -> float | None:
    """Seconds to the stage's end at the pace of its newest steps."""
    if len(newest) < 2:
        return None
    pace = (newest[-1].time - newest[0].time) / (len(newest) - 1)
    return pace * max(0, stage.last_step - newest[-1].record.step)
