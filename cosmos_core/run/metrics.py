"""`metrics.jsonl`: the figures of every step and evaluation of a run, whatever trackers it has.

Each line is an object: `kind` (`step` or `evaluation`), `step`, `time` (unix, seconds) and the figures by name. Where a
run went back to an earlier step, the lines of what was undone stay in the file; `read` leaves them out.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cosmos_core.run.follower import Notify

FILE: Final = "metrics.jsonl"
_KINDS: Final[Mapping[str, str]] = {"cosmos_step_finished": "step", "cosmos_evaluation_finished": "evaluation"}
_LOG: Final = logging.getLogger(__name__)


def recorded(directory: Path, notify: Notify) -> Notify:
    """A `Notify` that writes the figures into the run's folder, and then tells `notify`."""
    has_failed = is_begun = False

    def record(hook: str, **arguments: Any) -> None:
        nonlocal has_failed, is_begun
        if hook in _KINDS:
            told = {"kind": _KINDS[hook], "step": arguments["step"], "time": round(time.time(), 3)}
            row = told | {name: value if math.isfinite(value) else None for name, value in arguments["metrics"].items()}
            try:
                with (directory / FILE).open("a", encoding="utf-8") as file:
                    # What a killed session has cut off is a line of its own.
                    file.write(("" if is_begun or not file.tell() else "\n") + json.dumps(row) + "\n")
                is_begun = True
            except OSError as error:
                if not has_failed:
                    _LOG.warning("metrics are not kept: %s cannot be written: %s", directory / FILE, error)
                has_failed = True
        notify(hook, **arguments)

    return record


def read(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run in the order of the file, without what was undone since, or a line that was cut off."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    newest = 0
    path = directory / FILE
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            kind, step = row["kind"], row["step"]
        except (ValueError, TypeError, KeyError):
            continue
        if kind == "step":
            if step <= newest:
                rows = {key: each for key, each in rows.items() if key[1] < step}
            newest = step
        rows[kind, step] = row
    return list(rows.values())
