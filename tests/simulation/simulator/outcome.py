"""The judgement of how a run ended, and of where one stands that did not end."""

from __future__ import annotations

import re
from typing import Final

from cosmos_core.control.machine.settings import Settings
from cosmos_core.control.machine.state import State
from tests.simulation.simulator.witness import Violation

HOPELESS: Final = re.compile(
    r"the policy replicas were lost \d+ times before a checkpoint after step \d+; see "
    r"|the gradient group broke \d+ times in a row; last: "
    r"|step \d+ was tried \d+ times without success; last: "
)
"""Ends of a run that is given up on, as it came to nothing too often."""
_AVOIDABLE: Final = ("members hold the weights of", "payloads are gone")
"""What the controller itself must put right before it gives up."""


def check_outcome(state: State, settings: Settings, *, was_stopped: bool) -> None:
    """Judge the end of a run.

    Args:
        state: Its last one.
        settings: What it began with.
        was_stopped: Whether somebody asked for a stop.

    Raises:
        Violation: It must not have ended like this.
    """
    is_avoidable = any(words in state.reason for words in _AVOIDABLE)
    if state.outcome == "failed" and HOPELESS.match(state.reason) and not is_avoidable:
        return
    if state.outcome != "finished" and not (was_stopped and state.outcome == "stopped"):
        raise Violation("liveness", f"the run {state.outcome}: {state.reason}")
    if state.outcome == "finished" and state.step != settings.last_step:
        raise Violation("liveness", f"the run finished at step {state.step} of {settings.last_step}")


def progress_of(state: State) -> str:
    """The progress of a run, for people."""
    ledger = state.ledger
    return (
        f"term {state.term}, step {state.step} of {state.settings.last_step}, running "
        f"{state.running and state.running.order.step}, generation {state.generation and state.generation.order}, "
        f"queued {ledger.queued}, in flight {ledger.in_flight}, finished {sorted(ledger.finished)}, replicas "
        f"{sorted(state.replicas)}, target {state.target}, evaluations due "
        f"{[due.version for due in state.pending]}, outcome {state.outcome!r}"
    )
