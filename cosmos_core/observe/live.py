"""Live progress on the terminal: a panel that refreshes, or a plain line now and then where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_PLAIN_INTERVAL_S: Final = 5.0
_REFRESH_PER_S: Final = 4


@attrs.frozen(kw_only=True)
class Progress:
    """The state of a run at one moment, to be shown; None where it is not known or does not apply.

    Attributes:
        phase: What the run is doing, in a few words.
        step: Steps done, the warm-up's included.
        num_steps: Steps of the whole run.
        stage: Name of the running stage's algorithm.
        reward: Mean reward of the newest steps.
        accuracy: Held-out accuracy of the newest evaluation of rollouts.
        heldout_reward: Their held-out reward, where they have no accuracy; without either, none of them was scored.
        evaluated_step: Weight version of that evaluation.
        unscored: How many of its prompts have no score, in words; an accuracy counts them as 0.
        heldout_loss: Loss of held-out demonstrations, newest.
        measured_step: Weight version of that loss.
        staleness_mean: Of the newest steps' samples.
        policy_units_per_s: Units that the policy pool trains on.
        rollout_units_per_s: Units that the rollout pool generates.
        dropped: Prompts dropped so far.
        queued: Finished groups that wait to be trained on.
        in_flight: Prompts being completed.
        restarts: Processes that were started again.
        eta_s: Seconds to the end, if the run goes on like this.
        elapsed_s: Seconds since the start.
        unit: What samples are made of, and rates count.
    """

    phase: str
    step: int
    num_steps: int
    stage: str
    elapsed_s: float
    reward: float | None = None
    accuracy: float | None = None
    heldout_reward: float | None = None
    evaluated_step: int | None = None
    unscored: str = ""
    heldout_loss: float | None = None
    measured_step: int | None = None
    staleness_mean: float | None = None
    policy_units_per_s: float | None = None
    rollout_units_per_s: float | None = None
    dropped: int = 0
    queued: int | None = None
    in_flight: int | None = None
    restarts: int = 0
    eta_s: float | None = None
    unit: str = "token"


class LiveView:
    """A panel at the bottom of a terminal."""

    def __init__(self, console: Console) -> None:
        self._live: Final = Live(console=console, refresh_per_second=_REFRESH_PER_S, transient=True)
        self._live.start()

    def show(self, progress: Progress) -> None:
        """Refresh the panel."""
        self._live.update(panel(progress))

    def say(self, message: str) -> None:
        """Print above the panel."""
        self._live.console.print(Text(message))

    def close(self) -> None:
        """Remove the panel."""
        self._live.stop()


class PlainView:
    """A line every few seconds, and at each evaluation."""

    def __init__(self, console: Console) -> None:
        self._console: Final = console
        self._shown_at = float("-inf")
        self._evaluated: tuple[int | None, int | None] = (None, None)

    def show(self, progress: Progress) -> None:
        """Print a line if it is time."""
        now = time.monotonic()
        evaluated = (progress.evaluated_step, progress.measured_step)
        is_new = evaluated != self._evaluated
        if is_new or now - self._shown_at >= _PLAIN_INTERVAL_S:
            self._shown_at, self._evaluated = now, evaluated
            self.say(line(progress))

    def say(self, message: str) -> None:
        """Print a line."""
        self._console.print(Text(message), soft_wrap=True)

    def close(self) -> None:
        """Nothing to undo."""


View: TypeAlias = LiveView | PlainView
"""Shows progress: the newest state, cheaply enough for many times a second, and what happened, at once."""


def make_view(console: Console) -> View:
    """The view that suits the console."""
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView(console)


def line(progress: Progress) -> str:
    """Progress as one line."""
    parts = [f"{clock(progress.elapsed_s)} {progress.phase}", f"step {progress.step}/{progress.num_steps}"]
    parts += [f"{label} {value}" for label, value in facts(progress)]
    if progress.eta_s is not None:
        parts.append(f"ETA {clock(progress.eta_s)}")
    return " | ".join(parts)


def panel(progress: Progress) -> RenderableType:
    """Progress as a bar with its figures below."""
    eta = "" if progress.eta_s is None else f"  ETA {clock(progress.eta_s)}"
    right = f"step {progress.step}/{progress.num_steps}  {clock(progress.elapsed_s)}{eta}"
    left = Text(progress.phase, style="bold")
    return Group(*bar_and_figures(left, progress.step, progress.num_steps, right, facts(progress)))


def bar_and_figures(
    left: Text, step: int, num_steps: int, right: str, figures: Sequence[tuple[str, str]]
) -> tuple[Table, Columns]:
    """A bar between two texts, and (label, value) pairs."""
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, justify="right")
    bar.add_row(left, ProgressBar(total=max(1, num_steps), completed=step), Text(right))
    shown = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in figures]
    return bar, Columns(shown, padding=(0, 3))


def facts(progress: Progress) -> list[tuple[str, str]]:
    """(label, value) of everything that is known."""
    found: list[tuple[str, str]] = [("stage", progress.stage)]
    if progress.reward is not None:
        found.append(("reward", f"{progress.reward:.3f}"))
    if progress.evaluated_step is not None:
        score = progress.heldout_reward if progress.accuracy is None else progress.accuracy
        label = "held-out" if progress.unit == "token" and progress.heldout_reward is None else "held-out reward"
        value = "not measured" if score is None else f"{score:.3f}"
        found.append((label, f"{value} @{progress.evaluated_step}{bracketed(progress.unscored)}"))
    if progress.heldout_loss is not None:
        found.append(("held-out loss", f"{progress.heldout_loss:.4f} @{progress.measured_step}"))
    if progress.staleness_mean is not None:
        found.append(("staleness", f"{progress.staleness_mean:.2f}"))
    for pool, pace in (("policy", progress.policy_units_per_s), ("rollout", progress.rollout_units_per_s)):
        if pace is not None:
            found.append((pool, rate(pace, progress.unit)))
    if progress.queued is not None:
        found.append(("queue", f"{progress.queued} ready, {progress.in_flight or 0} in flight"))
    if progress.restarts:
        found.append(("started again", str(progress.restarts)))
    if progress.dropped:
        found.append(("dropped", f"{progress.dropped:,} prompts"))
    return found


def bracketed(*notes: str) -> str:
    """Notes to be put after a figure; nothing without any."""
    found = "; ".join(filter(None, notes))
    return f" ({found})" if found else ""


def rate(units_per_s: float, unit: str) -> str:
    """A throughput, in what samples are made of."""
    return f"{units_per_s:,.0f} {'tok' if unit == 'token' else f'{unit}s'}/s"


def clock(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
