"""A run, as Python has it: made by `train`, or found by `open`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from cosmos_core.api.process import LOOK_S, Child
from cosmos_core.config.loading import load_job
from cosmos_core.errors import CosmosError, ReplicaError
from cosmos_core.run import folder, metrics
from cosmos_core.run.requests import ask
from cosmos_core.run.screen import lines
from cosmos_core.run.status import Watcher, look
from cosmos_core.storage.samples import samples
from cosmos_core.transport.messages import Stop


class Run:
    """A run in a folder.

    Attributes:
        directory: Its folder, such as `runs/arithmetic`.
    """

    def __init__(self, directory: Path, child: Child | None = None) -> None:
        self.directory: Final = directory
        self._child = child

    def __repr__(self) -> str:
        words = self.status()[0] if folder.is_run(self.directory) else "removed: it had not begun"
        return f"Run({str(self.directory)!r}, {words!r})"

    def status(self) -> list[str]:
        """Lines about the run as it is now, as of `cosmos status`."""
        return list(look(self.directory))

    def wait(self) -> str:
        """Wait until the run has ended; shows progress.

        Returns:
            Its outcome, `finished` or `stopped`.

        Raises:
            KeyboardInterrupt: Ctrl-C, which has stopped the run at its next step, with a checkpoint (a second one:
                at once); the outcome in `summary` is `stopped`. A run that another process began goes on.
            ReplicaError: It failed; the message says why.
        """
        if self._child is not None:
            child, self._child = self._child, None
            was_stopped = child.wait(_shown(self.directory) if child.is_quiet else lambda: None)
            if was_stopped and folder.read_summary(self.directory) is None:
                return "stopped"
        while (ended := folder.read_summary(self.directory)) is None and folder.is_held(self.directory):
            time.sleep(LOOK_S)
        if ended is None:
            raise ReplicaError(f"{self.directory}: {self.status()[0]}")
        if ended.outcome == "failed":
            raise ReplicaError(f"{self.directory}: failed after {ended.steps} steps: {ended.reason}")
        return ended.outcome

    def stop(self) -> str:
        """Stop the run at the next step, with a checkpoint, and wait for its end; see `wait`."""
        if self._child is not None:
            self._child.interrupt()
        else:
            ask(self.directory, Stop())
        return self.wait()

    def metrics(self) -> Any:
        """The figures of each step, as a table (pandas) or, without pandas, a list of dictionaries."""
        return self._figures("step")

    def evaluations(self) -> Any:
        """The figures of each held-out evaluation, likewise."""
        return self._figures("evaluation")

    def samples(self, **wanted: Any) -> Any:
        """The kept samples, likewise, with the columns of docs/samples.md; `wanted` as of `storage.samples.samples`."""
        return _table(list(samples(self.directory, **wanted)))

    def _figures(self, kind: str) -> Any:
        rows = (row for row in metrics.read(self.directory) if row["kind"] == kind)
        return _table([{name: value for name, value in row.items() if name != "kind"} for row in rows])

    def summary(self) -> dict[str, Any]:
        """The summary of an ended run (`summary.json`); empty before that."""
        path = self.directory / folder.SUMMARY
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def model(self, step: str = "latest") -> Path:
        """Export the model of a checkpoint (a number, `best` or `latest`); its folder, for `from_pretrained`.

        Raises:
            CosmosError: There is no such checkpoint, or it cannot be exported.
        """
        from cosmos_core.run.export import export_run  # noqa: PLC0415 - imports torch

        return Path(export_run(self.directory, step=step, output=None).place)


def open_run(directory: str | Path) -> Run:
    """A run in a folder, going on or ended; a ConfigError says that there is none."""
    load_job(Path(directory))
    return Run(Path(directory))


def _table(found: Sequence[Mapping[str, Any]]) -> Any:
    if find_spec("pandas") is None:
        return found
    import pandas as pd  # noqa: PLC0415 - a second to import, and not of the core's dependencies

    return pd.DataFrame(found)


def _shown(directory: Path) -> Callable[[], None]:
    """A function that shows the newest state of a run below a notebook's cell, in the place of the one before."""
    from IPython.display import HTML, display  # noqa: PLC0415 - it is a notebook

    handle = display(HTML(""), display_id=True)
    watcher = Watcher(load_job(directory))
    following = watcher.follow()

    def show() -> None:
        nonlocal following
        if not folder.is_held(directory):
            following = watcher.follow()  # it is over: what the journal holds at last
        try:
            snapshot = next(following)
        except (StopIteration, CosmosError, OSError):
            following = watcher.follow()  # an interrupt, too, has ended it
            return
        if snapshot is not None:
            handle.update(HTML(f"<pre>{escape(chr(10).join(lines(snapshot)))}</pre>"))

    return show
