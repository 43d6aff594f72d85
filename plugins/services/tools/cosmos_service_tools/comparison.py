"""Runs side by side: what their folders say, the figures of each, and the keys in which their recipes differ."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from rich.table import Table
from rich.text import Text

from cosmos_core.config import sources
from cosmos_core.errors import ConfigError
from cosmos_core.observe.output import console
from cosmos_core.run import folder, metrics

_PART: Final = 0.1
"""Of the steps, the first and the last whose rewards are averaged."""
_IDENTITY: Final = ("run.name", "run.output_dir")
_ABSENT: Final = "-"


@attrs.frozen(kw_only=True, eq=False)
class Compared:
    """A run.

    Attributes:
        directory: Its folder.
        label: Name of the run, or its folder's path where two have one name.
        recipe: Values by dotted key, as resolved.
        summary: `summary.json`; empty while it goes on, or where it was interrupted.
        rows: What `metrics.jsonl` has of its steps and evaluations, in order.
        warmup: Steps of its warm-up.
    """

    directory: Path
    label: str
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    warmup: int

    @property
    def lacks_metrics(self) -> bool:
        """True if it has no `metrics.jsonl`, as a run of an earlier release."""
        return not (self.directory / metrics.FILE).exists()

    @property
    def outcome(self) -> str:
        """How it ended; or that it goes on, or was interrupted."""
        return str(self.summary["outcome"]) if self.summary else _unfinished(self.directory)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The rows of the main stage's steps."""
        return [row for row in self.rows if row["kind"] == "step" and row["step"] > self.warmup]


def load(directories: Sequence[Path]) -> list[Compared]:
    """Read runs; raises ConfigError where a folder is none, or is not what a run writes."""
    unique = list(dict.fromkeys(path.resolve() for path in directories))
    names = [path.name for path in unique]
    shown = {path.resolve(): str(path) for path in directories}
    return [_load(path, path.name if names.count(path.name) == 1 else shown[path]) for path in unique]


def _load(directory: Path, label: str) -> Compared:
    if not folder.is_run(directory):
        raise ConfigError(f"{directory}: not the folder of a run (it has no job.json)")
    path = directory / "recipe.resolved.toml"
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
        path = directory / folder.SUMMARY
        summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path = directory / metrics.FILE
        rows = metrics.read(directory)
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    warmup = recipe.get("warmup", {}).get("steps", 0)
    flat = dict(_flat(recipe))
    return Compared(directory=directory, label=label, recipe=flat, summary=summary, rows=rows, warmup=warmup)


def _unfinished(directory: Path) -> str:
    return "goes on" if folder.is_held(directory) else "interrupted"


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; tables of a list go by their names, or plugins, where these tell them apart."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _flat(each, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        names = [str(each.get("name") or sources.label(str(each.get("plugin")))) for each in value]
        for index, each in enumerate(value):
            yield from _flat(each, f"{key}[{names[index] if names.count(names[index]) == 1 else index}]")
    else:
        yield key, value


def differing(runs: Sequence[Compared]) -> dict[str, list[Any]]:
    """The keys in which recipes differ, and the value of each run; None where it has no such key."""
    keys = dict.fromkeys(key for run in runs for key in run.recipe if key not in _IDENTITY)
    values = {key: [run.recipe.get(key) for run in runs] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each) and _tells(key, runs)}


def _tells(key: str, runs: Sequence[Compared]) -> bool:
    """False for what only follows from a table of a list, such as a reward, that some of the runs do not have."""
    if any(other.startswith(f"{key}[") for run in runs for other in run.recipe):
        return False
    table, inside, rest = key.rpartition("].")
    if not inside or rest in ("name", "plugin"):
        return True
    having = [run.recipe for run in runs if any(other.startswith(f"{table}].") for other in run.recipe)]
    return any(recipe.get(key) != having[0].get(key) for recipe in having)


def figures(run: Compared) -> dict[str, Any]:
    """The figures of a run, as plain data; None where it is not known.

    `reward` is the mean of the first and of the last tenth of the main stage's steps.
    """
    summary = run.summary
    samples = summary.get("samples", {})
    rates: Mapping[str, float | None] = next((value for key, value in summary.items() if key.endswith("s_per_s")), {})
    return {
        "run": str(run.directory),
        "label": run.label,
        "outcome": run.outcome,
        "reason": summary.get("reason", ""),
        "steps": summary.get("steps", max((row["step"] for row in run.rows), default=0)),
        "planned_steps": summary.get("planned_steps"),
        "wall_s": summary.get("wall_s"),
        **{f"heldout_{name}": _before_and_after(run, name) for name in ("accuracy", "reward", "loss")},
        "reward": _first_and_last([row["reward/mean"] for row in run.steps if row.get("reward/mean") is not None]),
        **{f"{pool}_units_per_s": rate for pool, rate in rates.items()},
        "samples": samples.get("generated"),
        "consumed": samples.get("consumed"),
        "trained_on": samples.get("trained"),
        "dropped": sum(samples["dropped"].values()) if "dropped" in samples else None,
    }


def _before_and_after(run: Compared, name: str) -> list[float | None] | None:
    """A held-out figure before the main stage and the last one after a step of it; None where there is neither."""
    key = f"heldout_{name}"
    # Metrics do not say which evaluations other rewards scored; the summary does.
    rows = () if any("outdated" in each for each in run.summary.get("evaluations", ())) else run.rows
    values = [(row["step"], row[f"heldout/{name}"]) for row in rows if f"heldout/{name}" in row]
    before = next((value for step, value in values if step <= run.warmup), None)
    after = next((value for step, value in reversed(values) if step > run.warmup), None)
    found = [run.summary.get(f"{key}_before", before), run.summary.get(f"{key}_after", after)]
    return found if found != [None, None] else None


def _first_and_last(values: Sequence[float]) -> list[float] | None:
    if not values:
        return None
    part = max(1, round(_PART * len(values)))
    return [sum(some) / part for some in (values[:part], values[-part:])]


def lines(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """(label, a text for each run) of what is known of any, as a table shows it; then the keys that differ."""
    found = [figures(run) for run in runs]
    names = dict.fromkeys(name for each in found for name in each if name not in ("run", "label", "reason"))
    told = []
    for name in names:
        if name != "planned_steps":
            texts = [_words(name, each.get(name), each) for each in found]
            told.append((_LABELS.get(name, name.replace("_", " ")), texts))
    # The mean of a single reward of 0 and 1 is the accuracy.
    same = [texts for name, texts in told if name == _LABELS["heldout_accuracy"]]
    told = [(name, texts) for name, texts in told if name != _LABELS["heldout_reward"] or texts not in same]
    told = [(name, texts) for name, texts in told if any(text != _ABSENT for text in texts)]
    return told + [(key, [_value(value) for value in values]) for key, values in differing(runs).items()]


_LABELS: Final = {
    "wall_s": "wall time (s)",
    "heldout_accuracy": "held-out accuracy",
    "heldout_reward": "held-out reward",
    "heldout_loss": "held-out loss",
    "policy_units_per_s": "units/s, policy",
    "rollout_units_per_s": "units/s, rollout",
    "consumed": "samples consumed",
    "trained_on": "samples trained on",
    "dropped": "samples dropped",
}


def _words(name: str, value: Any, found: Mapping[str, Any]) -> str:
    if value is None:
        return _ABSENT
    if name == "steps" and found["planned_steps"]:
        return f"{value:,} of {found['planned_steps']:,}"
    if isinstance(value, list):
        return " → ".join(_ABSENT if each is None else f"{each:.4g}" for each in value)
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def _value(value: Any) -> str:
    return _ABSENT if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def notes(runs: Sequence[Compared]) -> list[str]:
    """What the comparison lacks, a sentence each."""
    old = [run.label for run in runs if run.lacks_metrics]
    told = [f"{', '.join(old)}: no {metrics.FILE}, so there are no curves; figures are those of {folder.SUMMARY}."]
    failed = [f"{run.label}: {run.summary['reason']}" for run in runs if run.summary.get("reason")]
    return [*(told if old else []), *failed]


def show(runs: Sequence[Compared]) -> None:
    """Print the table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", style="dim", overflow="fold")
    for run in runs:
        table.add_column(Text(run.label), overflow="fold")
    for label, texts in lines(runs):
        table.add_row(Text(label), *(Text(text) for text in texts))
    output = console()
    output.print(table)
    for note in notes(runs):
        output.print(Text(note), soft_wrap=True)


def as_plain(runs: Sequence[Compared]) -> str:
    """The comparison as JSON: `runs`, a list of figures, and `recipe`, values by key that differs, in that order."""
    return json.dumps({"runs": [figures(run) for run in runs], "recipe": differing(runs)}, indent=2, default=str)
