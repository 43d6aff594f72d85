"""A run that no controller serves: how it ended, in one word for all who tell of it."""

from __future__ import annotations

from typing import Final

from cosmos_core.config.job import Job
from cosmos_core.control.machine.state import State
from cosmos_core.run.files import folder
from cosmos_core.run.files.presence import absence

INTERRUPTED: Final = "interrupted"


def ended(job: Job, state: State) -> tuple[str, str]:
    """Outcome and reason of a run without a controller; no outcome if its last session came to none.

    Raises:
        ConfigError: The summary of that session is damaged.
    """
    if not state.outcome and (summary := folder.read_summary(job.directory)) is not None:
        # The supervisor ended it, after the controller.
        return summary.outcome, summary.reason
    return state.outcome, state.reason


def interrupted(job: Job) -> str:
    """What to say of one that came to no outcome."""
    return f"{INTERRUPTED}: {absence(job)}; cosmos run --resume goes on"
