"""How a run ended, and why, in words."""

from __future__ import annotations

import attrs

from cosmos_core.run.launch import Exit
from cosmos_core.run.supervising.restarts import last_words


@attrs.frozen(kw_only=True)
class Ending:
    """How a run ended: `outcome` is `finished`, `stopped` or `failed`; `reason` says why, if there is more to say."""

    outcome: str
    reason: str = ""


def with_cause(reason: str, failure: Exit) -> str:
    """The controller's reason, and what ended a process first unless that reason says it already.

    Args:
        reason: May be empty.
        failure: The first process that ended although the run had not.
    """
    replica, _, rank = failure.name.partition(".")
    is_said = bool(failure.error) and failure.error in reason
    # A replica's leader tells the controller which of the others is gone.
    is_said = is_said or (bool(rank) and f"{replica} rank {rank}: " in reason)
    words = "" if is_said else f"{failure.name}: {last_words(failure)}"
    return "\n".join(filter(None, (reason, words)))
