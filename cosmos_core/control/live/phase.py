"""What a run is doing, in a few words."""

from __future__ import annotations

from cosmos_core.config.stages import Stage
from cosmos_core.control.machine.state import State


def phase_of(state: State, stage: Stage) -> str:
    """What the run is doing, in a few words.

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
