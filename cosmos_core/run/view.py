"""What the terminal of a run shows, from the run as it is followed."""

from __future__ import annotations

from typing import Final

import attrs

from cosmos_core.config.stages import Stage
from cosmos_core.control.live.figures import Gauges, figures
from cosmos_core.control.machine.state import State
from cosmos_core.observe.live import Progress
from cosmos_core.run.following.follower import Follower

WAITING: Final = "waiting for the controller"
"""The phase of a run whose controller is not heard, and may be again."""


def progress_of(follower: Follower, stages: tuple[Stage, ...], gauges: Gauges, *, now: float | None) -> Progress:
    """The newest progress.

    Args:
        follower: The run so far.
        stages: Stages of the recipe.
        gauges: What its processes said last.
        now: Unix time; None for a run that nobody runs now.
    """
    if follower.state is None:
        return starting(stages, 0, elapsed_s=0.0)
    return figures(follower.state, follower.timeline, stages, gauges, now=now)


def waiting(follower: Follower, stages: tuple[Stage, ...], *, heard: float) -> Progress:
    """Progress while the controller is not heard: without paces, which are of before, and the clock stands.

    Args:
        follower: The run so far.
        stages: Stages of the recipe.
        heard: Unix time at which it was heard last.
    """
    known = progress_of(follower, stages, {}, now=None)
    return attrs.evolve(known, phase=WAITING, elapsed_s=follower.timeline.elapsed_s(heard))


def starting(stages: tuple[Stage, ...], step: int, *, elapsed_s: float) -> Progress:
    """Progress before anything is known of this session: figures of an earlier one would look like this one's.

    Args:
        stages: Stages of the recipe.
        step: The session goes on from.
        elapsed_s: Seconds for which the run went on before.
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
