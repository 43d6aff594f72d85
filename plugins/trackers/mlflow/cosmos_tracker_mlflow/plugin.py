"""The MLflow tracker, a lifecycle plugin: every metric of a run, logged asynchronously, and at its end some samples.

`mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` opens it. Nothing of MLflow is imported before the run
starts, and the core runs without it installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from cosmos_core.errors import ConfigError, PluginError
from cosmos_core.protocols import Provider, RunInfo, hookimpl
from cosmos_core.storage.samples import ranked, samples, summaries
from cosmos_core.types import Scalar

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUN_TAG: Final = "cosmos.run_id"
_PARAMS_PER_BATCH: Final = 100  # MLflow's own limit
_LONGEST_PARAM: Final = 6000  # likewise
_NOT_ALLOWED: Final = re.compile(r"[^\w\-. :/]")
_LONGEST_NAME: Final = 250  # likewise
_MOST_QUEUED: Final = 64
_TABLED: Final = 8
"""Prompts of each purpose and order in the table of samples, and how much of each."""
_TABLED_SAMPLES: Final = 16
_TABLED_TEXT: Final = 2000
_LOOKED_AT: Final = 50_000
_TEXTS: Final = ("prompt", "completion", "detail", "media")
_FACTS: Final = ("step", "purpose", "row", "lease", "index", "reward", "advantage", "status", "fate", "newest_version")
_STATUS: Final[Mapping[str, str]] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@attrs.frozen(kw_only=True)
class MlflowOptions:
    """Options of the `mlflow` hook."""

    experiment: str = attrs.field(
        default="cosmos", metadata={"help": "Name of the experiment; made if it is not there."}
    )
    tracking_uri: str | None = attrs.field(
        default=None, metadata={"help": "Where MLflow keeps runs; `sqlite:///RUN/mlflow.db` if absent."}
    )
    system: bool = attrs.field(
        default=False, metadata={"help": "Whether MLflow samples CPU and memory of the supervisor's machine."}
    )
    samples: bool = attrs.field(
        default=True, metadata={"help": "Whether a table of some kept samples is logged when the run ends."}
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested mappings and lists as (`a.b.0.c`, text)."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}.")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            yield from flatten({str(index): item for index, item in enumerate(value)}, f"{path}.")
        else:
            yield path, str(value)


class MlflowTracker:
    """Lifecycle hooks that log to one MLflow run; a resumed run goes on in the run it began."""

    def __init__(self, options: MlflowOptions, run: RunInfo) -> None:
        self._options: Final = options
        self._directory: Final = run.directory
        self._uri: Final = options.tracking_uri or f"sqlite:///{(run.directory / 'mlflow.db').resolve()}"
        self._client: MlflowClient | None = None
        self._monitor: Any = None
        self._queued: Final[deque[Any]] = deque()
        self._run_id = ""

    @hookimpl
    def cosmos_run_started(self, run: RunInfo) -> None:
        """Open the MLflow run and log the recipe as its parameters."""
        # No part of a run talks to a network that the user did not ask for.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Else the making of a database, and tracebacks, are told on the terminal, in the middle of the live view.
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
        from mlflow import MlflowClient  # noqa: PLC0415 - seconds of import, only in runs that track

        client = MlflowClient(tracking_uri=self._uri)
        # MLflow's own default is a folder wherever the run was begun.
        place = None if self._options.tracking_uri else (run.directory / "mlartifacts").resolve().as_uri()
        self._run_id, is_new = _open_run(client, self._options.experiment, run, place)
        note = _log_params if is_new else _tag_changes
        note(client, self._run_id, run.recipe)
        if self._options.system:
            self._monitor = _system_monitor(self._uri, self._run_id)
        self._client = client

    @hookimpl
    def cosmos_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._log(step, metrics)

    @hookimpl
    def cosmos_evaluation_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation."""
        self._log(step, metrics)

    @hookimpl
    def cosmos_setting_changed(self, step: int, key: str, after: Scalar) -> None:
        """Note the newest value of a key that was changed while the run goes on as a tag."""
        if self._client is not None:
            tag = f"cosmos.set.{_NOT_ALLOWED.sub('_', key)}"[:_LONGEST_NAME]
            self._client.set_tag(self._run_id, tag, f"{after} from step {step} on"[:_LONGEST_PARAM])

    @hookimpl
    def cosmos_checkpoint_saved(self, step: int, path: str) -> None:
        """Note the newest checkpoint as tags."""
        if self._client is not None:
            self._client.set_tag(self._run_id, "cosmos.checkpoint", path)
            self._client.set_tag(self._run_id, "cosmos.checkpoint_step", str(step))

    @hookimpl
    def cosmos_run_ended(self, outcome: str, summary: Mapping[str, Any]) -> str | None:
        """Flush what is queued, note the outcome, close the MLflow run and log samples; the command that shows them."""
        if self._client is None:
            return None
        if self._monitor is not None:
            self._monitor.finish()
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            self._client.set_tag(self._run_id, f"cosmos.{name}", str(value))
        self._settle(0)
        self._client.set_terminated(self._run_id, status=_STATUS.get(outcome, "FAILED"))
        if self._options.samples:
            # Last: the run has ended, whatever the store of artifacts says.
            try:
                table = samples_table(self._directory)
            except ConfigError as error:
                table = {}
                self._client.set_tag(self._run_id, "cosmos.samples", str(error)[:_LONGEST_PARAM])
            if table:
                self._client.log_table(self._run_id, table, f"samples-step-{summary.get('steps', 0)}.json")
        # A URI of the user's own may hold a password.
        return None if self._options.tracking_uri else f"MLflow: mlflow ui --backend-store-uri {self._uri}"

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._client is None or not metrics:
            return
        from mlflow.entities import Metric  # noqa: PLC0415 - see above

        now_ms = int(time.time() * 1000)
        batch = [Metric(_allowed(name), value, now_ms, step) for name, value in metrics.items()]
        self._settle(_MOST_QUEUED)
        self._queued.append(self._client.log_batch(self._run_id, metrics=batch, synchronous=False))

    def _settle(self, most: int) -> None:
        """See what became of batches that were queued, until at most some of them are not written.

        Raises:
            PluginError: One could not be written.
        """
        # MLflow's own wait tells failures with their tracebacks, and cannot be asked without waiting.
        while self._queued and (len(self._queued) > most or all(each.done() for each in _futures(self._queued[0]))):
            for future in _futures(self._queued.popleft()):
                error = future.exception()
                if error is not None:
                    raise PluginError(f"{self._uri} cannot be written: {_root(error)}") from error


def samples_table(directory: Path) -> dict[str, list[Any]]:
    """Columns of samples of the newest prompts and of those with the lowest and the highest mean reward; {}: of none.

    Raises:
        ConfigError: What is kept cannot be read.
    """
    found = summaries(directory, newest=_LOOKED_AT)
    chosen: dict[int, str] = {}
    for purpose in ("train", "evaluation"):
        own = [each for each in found if each.purpose == purpose]
        for order in ("newest", "worst", "best"):
            for each in ranked(own, order)[:_TABLED]:
                chosen.setdefault(each.lease, order)
    columns = (*_TEXTS, "reward", "rewards")
    rows = []
    for sample in samples(directory, newest=_LOOKED_AT, lease=[*chosen], columns=columns) if chosen else ():
        if sample["index"] < _TABLED_SAMPLES:
            told = {"order": chosen[sample["lease"]], **{name: sample[name] for name in _FACTS}}
            texts = {name: (sample[name] or "")[:_TABLED_TEXT] for name in _TEXTS}
            rows.append({**told, **texts, "rewards": json.dumps(sample["rewards"])})
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _allowed(name: str) -> str:
    """A metric's name as MLflow takes it: a relative path of a few characters, not too long."""
    parts = _NOT_ALLOWED.sub("_", name).split("/")
    path = "/".join("_" * max(1, len(part)) if part in ("", ".", "..") else part for part in parts)
    if len(path) <= _LONGEST_NAME:
        return path
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{path[: _LONGEST_NAME - len(mark) - 1]}-{mark}"


def _futures(batch: Any) -> Sequence[Future[object]]:
    found: Sequence[Future[object]] = batch._operation_futures  # noqa: SLF001 - see above
    return found


def _root(error: BaseException) -> str:
    """A database's own message, without what libraries put around it."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _open_run(client: MlflowClient, experiment: str, run: RunInfo, place: str | None) -> tuple[str, bool]:
    """Id of the MLflow run of `run`, and whether it was made now; `place` is where a new experiment keeps artifacts."""
    found = client.get_experiment_by_name(experiment)
    experiment_id: str = found.experiment_id if found is not None else client.create_experiment(experiment, place)
    earlier = client.search_runs([experiment_id], filter_string=f"tags.`{_RUN_TAG}` = '{run.run_id}'", max_results=1)
    if earlier:
        run_id: str = earlier[0].info.run_id
        client.update_run(run_id, status="RUNNING")
        return run_id, False
    tags = {_RUN_TAG: run.run_id, "cosmos.directory": str(run.directory)}
    return client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id, True


def _params_of(recipe: Mapping[str, Any]) -> dict[str, str]:
    return {_NOT_ALLOWED.sub("_", key): value[:_LONGEST_PARAM] for key, value in flatten(recipe)}


def _log_params(client: MlflowClient, run_id: str, recipe: Mapping[str, Any]) -> None:
    from mlflow.entities import Param  # noqa: PLC0415 - see above

    params = [Param(key, value) for key, value in _params_of(recipe).items()]
    for first in range(0, len(params), _PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params[first : first + _PARAMS_PER_BATCH])


def _tag_changes(client: MlflowClient, run_id: str, recipe: Mapping[str, Any]) -> None:
    """MLflow never changes a parameter: what a resumed run has changed of its recipe goes into tags."""
    logged = client.get_run(run_id).data
    for key, value in _params_of(recipe).items():
        tag = f"cosmos.changed.{key}"
        if logged.tags.get(tag, logged.params.get(key)) != value:
            client.set_tag(run_id, tag, value)


def _system_monitor(uri: str, run_id: str) -> Any:
    import mlflow  # noqa: PLC0415 - see above
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor  # noqa: PLC0415 - see above

    mlflow.set_tracking_uri(uri)
    monitor = SystemMetricsMonitor(run_id)
    monitor.start()
    return monitor


@hookimpl
def cosmos_hook() -> Provider[object]:
    """Provide the tracker.

    Raises:
        PluginError: MLflow, or the part of it that opens databases, is not installed.
    """
    missing = [name for name in ("mlflow", "sqlalchemy") if importlib.util.find_spec(name) is None]
    if missing:
        raise PluginError(
            f"tracking.hooks: the hook 'mlflow' needs {' and '.join(missing)}, which cannot be found here; "
            "run: pip install mlflow"
        )
    return Provider(create=MlflowTracker, options=MlflowOptions)
