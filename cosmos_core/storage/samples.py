"""Reads the samples that a run has kept, part by part; the run may go on meanwhile."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.errors import ConfigError
from cosmos_core.storage.parts import FOLDER, counts_of, paths
from cosmos_core.types import SampleStatus

_KNOWN: Final = {"purpose": ("train", "evaluation"), "status": (*SampleStatus,)}
_KEYS: Final = ("lease", "index", "row", "position", "purpose", "status", "drop", "newest_version")
_BATCH_ROWS: Final = 1024
_FEW_ROWS: Final = 32
_DAMAGED: Final[dict[Path, int]] = {}
"""Parts that this process could not read, and when they had been written."""
_LOG: Final = logging.getLogger(__name__)


def samples(
    directory: Path,
    *,
    step: int | None = None,
    grep: str = "",
    columns: Sequence[str] = (),
    newest: int | None = None,
    **wanted: Any,
) -> Iterator[dict[str, Any]]:
    """Read the kept samples of a run, about in the order in which they were finished.

    Args:
        directory: The run's folder.
        step: Those of this step's batch, and those by which its weights were evaluated.
        grep: Those in whose prompt or completion this regular expression is found.
        columns: Those that are needed (docs/samples.md), besides some that are short; none: all.
        newest: Look into the parts that were begun last, until they have so many samples; None: into all.
        wanted: Values of `purpose`, `status`, `row` and `position`, and several of `lease`; None: any.

    Raises:
        ConfigError: It is not the folder of a run, or what is wanted is nonsense.

    What cannot be read is left out, and a warning logged: see `damaged`.
    """
    if not (directory / "job.json").is_file():
        raise ConfigError(f"{directory}: not the folder of a run")
    for name, known in _KNOWN.items():
        if wanted.get(name) not in (None, *known):
            raise ConfigError(f"{name} {wanted[name]!r} is none of {', '.join(known)}")
    try:
        pattern = re.compile(grep)
    except re.error as error:
        raise ConfigError(f"{grep!r} is no regular expression: {error}") from error
    steps = _steps(directory, newest)
    redone = _redone(steps)
    choice = _choice(step, steps, wanted)
    for path in _parts(directory, "samples", newest):
        with contextlib.suppress(FileNotFoundError), _opened(path) as file:
            for each in _rows(file, choice, columns):
                if not grep or pattern.search(each["prompt"]) or pattern.search(each["completion"]):
                    yield each | _fate(each, steps.get(each["lease"]), redone)


@attrs.define(kw_only=True)
class Summary:
    """The samples of a prompt that were asked for, without their texts and tokens."""

    lease: int
    position: int
    row: int
    purpose: str
    step: int | None
    time: float = 0.0
    num_samples: int = 0
    shows_media: bool = False
    rewards: list[float] = attrs.field(factory=list)
    statuses: Counter[str] = attrs.field(factory=Counter)
    fates: Counter[str] = attrs.field(factory=Counter)

    @property
    def reward(self) -> float | None:
        """The mean of those that have one."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None


_OF_STEP: Final = ("generation", "step", "attempt", "lease", "advantages", "trained")
_OF_GROUP: Final = ("lease", "position", "row", "purpose", "step")


def summaries(directory: Path, **wanted: Any) -> list[Summary]:
    """Read the samples of each prompt, `wanted` as by `samples`, as far as they are short."""
    found: dict[int, Summary] = {}
    columns = ("reward", "time", "media", *(("prompt", "completion") if wanted.get("grep") else ()))
    for each in samples(directory, columns=columns, **wanted):
        if (known := found.get(each["lease"])) is None:
            known = found[each["lease"]] = Summary(**{name: each[name] for name in _OF_GROUP})
        known.time = each["time"]
        known.num_samples += 1
        known.shows_media |= bool(each["media"])
        known.rewards += [] if each["reward"] is None else [each["reward"]]
        known.statuses[each["status"]] += 1
        known.fates[each["fate"]] += 1
    return [*found.values()]


def ranked(found: Sequence[Summary], order: str) -> list[Summary]:
    """The `newest` first, or of those with rewards the `worst` or `best` mean first, of equal ones the newest."""
    newest = sorted(found, key=lambda each: each.time, reverse=True)
    if order == "newest":
        return newest
    rewarded = [(each.reward, each) for each in newest if each.reward is not None]
    return [each for _, each in sorted(rewarded, key=lambda pair: pair[0], reverse=order == "best")]


def groups(directory: Path, *, order: str = "newest", count: int = 5, **wanted: Any) -> list[list[dict[str, Any]]]:
    """Read the samples of at most `count` prompts, each prompt's together; `wanted` as by `samples`.

    The order is `newest` first, or `worst` or `best` first by the mean reward of a prompt's samples, if it has one.
    """
    chosen = [each.lease for each in ranked(summaries(directory, **wanted), order)[:count]]
    found: dict[int, list[dict[str, Any]]] = {lease: [] for lease in chosen}
    for each in samples(directory, lease=chosen, **wanted):
        found[each["lease"]].append(each)
    # What was removed meanwhile is gone.
    return [sorted(group, key=lambda each: each["index"]) for group in found.values() if group]


def _choice(
    step: int | None, steps: Mapping[int, Mapping[str, Any]], wanted: Mapping[str, Any]
) -> Callable[[Any], Any]:
    """Makes the mask of a table with `_KEYS`: an expression would import pandas, which takes half a second."""
    from pyarrow import compute  # noqa: PLC0415 - where samples are read

    batch = [lease for lease, each in steps.items() if each["step"] == step]

    def mask(table: Any) -> Any:
        found = [compute.is_valid(table["lease"])]
        for name, value in wanted.items():
            if value is not None:
                found.append(_is_in(table[name], value if name == "lease" else [value]))
        if step is not None:
            evaluated = _is_in(table["purpose"], ["evaluation"]), _is_in(table["newest_version"], [step])
            found.append(compute.or_(_is_in(table["lease"], batch), compute.and_(*evaluated)))
        return functools.reduce(compute.and_, found)

    return mask


def _is_in(found: Any, values: Sequence[int] | Sequence[str]) -> Any:
    """The mask of those of a column that are among values."""
    from pyarrow import compute  # noqa: PLC0415 - where samples are read

    from cosmos_core.storage.columns import column  # noqa: PLC0415

    return compute.is_in(found, value_set=column(found.type, values))


def _rows(file: Any, choice: Callable[[Any], Any], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa  # noqa: PLC0415 - where samples are read
    from pyarrow import compute  # noqa: PLC0415

    if not compute.any(choice(file.read(columns=_KEYS))).as_py():
        return
    for batch in file.iter_batches(_BATCH_ROWS, columns=[*columns, *_KEYS] if columns else None):
        table = pa.Table.from_batches([batch])
        # As numbers of Python's, tokens take ten times as much: not all at once.
        for some in table.filter(choice(table)).to_batches(None if columns else _FEW_ROWS):
            yield from some.to_pylist()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A part as a `pyarrow.parquet.ParquetFile`; FileNotFoundError: it was removed meanwhile, or is damaged."""
    import pyarrow as pa  # noqa: PLC0415 - where samples are read
    from pyarrow import parquet  # noqa: PLC0415

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        written = _written_at(path)
        if written and _DAMAGED.get(path) != written:
            _DAMAGED[path] = written
            _LOG.warning("%s: cannot be read, and is left out: %s", path, " ".join(str(error).split()))
        raise FileNotFoundError from error


def _written_at(path: Path) -> int:
    """When a file was written, in ns; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def damaged(directory: Path) -> str:
    """Name the parts of a run that this process could not read, and left out; empty if it came upon none."""
    mine = sorted((path, at) for path, at in _DAMAGED.items() if path.parent == directory / FOLDER)
    found = [path.name for path, at in mine if _written_at(path) == at]
    return f"cannot be read, and left out: {', '.join(found)}" if found else ""


def _parts(directory: Path, kind: str, newest: int | None = None) -> list[Path]:
    """The parts in the order in which they were begun; where `newest` is given the last ones that have so many rows."""
    found = paths(directory / FOLDER, kind)
    if newest is None:
        return found
    for number, path in enumerate(reversed(found), start=1):
        with contextlib.suppress(FileNotFoundError), _opened(path) as file:
            newest -= file.metadata.num_rows
        if newest <= 0:
            return found[-number:]
    return found


def _steps(directory: Path, newest: int | None = None) -> dict[int, dict[str, Any]]:
    """Rows of `policy.training.step.schema` by lease, those of the newest attempts, and whether each was `undone`."""
    rows: list[dict[str, Any]] = []
    for path in _parts(directory, "steps", newest):
        with contextlib.suppress(FileNotFoundError), _opened(path) as file:
            rows += file.read(columns=_OF_STEP).to_pylist()
    rows.sort(key=lambda row: (-row["generation"], row["step"]))
    found, limit = dict[int, dict[str, Any]](), math.inf
    for _, generation in itertools.groupby(rows, key=lambda row: row["generation"]):
        held = [*generation]
        for row in held:
            found.setdefault(row["lease"], row | {"undone": row["step"] >= limit})
        # Who trained a step in a later generation went on from before it.
        limit = min(limit, held[0]["step"])
    return found


def ratios(
    directory: Path, leases: Sequence[int], most: int, newest: int | None = None
) -> dict[tuple[int, int], list[float]]:
    """Ratios of the policy's to the engine's probability, of the first decisions of samples, by (lease, index).

    They are of the newest attempt at a step, where they were kept; `newest` as of `samples`.
    """
    from pyarrow import compute  # noqa: PLC0415 - where samples are read

    found: dict[int, tuple[tuple[int, int], Any]] = {}
    for path in _parts(directory, "steps", newest):
        with contextlib.suppress(FileNotFoundError), _opened(path) as file:
            mine = _is_in(file.read(columns=["lease"])["lease"], leases)
            # An earlier release kept none; they are most of a part, which is read for its own groups alone.
            if "ratios" in file.schema_arrow.names and compute.any(mine).as_py():
                table = file.read(columns=["generation", "attempt", "lease", "ratios"]).filter(mine)
                for generation, attempt, lease, lists in zip(*table.columns, strict=True):
                    each = (generation.as_py(), attempt.as_py()), lists.values
                    found[lease.as_py()] = max(found.get(lease.as_py(), each), each, key=lambda pair: pair[0])
    return {
        (lease, index): values[:most].to_pylist()
        for lease, (_, lists) in found.items()
        if lists is not None
        for index, values in enumerate(each.values for each in lists)
        if values is not None
    }


def _redone(steps: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """The newest lease of each step's batch, infinite where it is undone: evaluations of earlier leases are, too."""
    newest = dict.fromkeys((row["step"] for row in steps.values()), math.inf)
    for lease, row in steps.items():
        if not row["undone"]:
            newest[row["step"]] = lease if newest[row["step"]] == math.inf else max(newest[row["step"]], lease)
    return newest


def _fate(record: Mapping[str, Any], known: Mapping[str, Any] | None, redone: Mapping[int, float]) -> dict[str, Any]:
    """The fate of a sample, and those of its values that are text or pairs in the file."""
    told = {name: json.loads(record[name]) for name in ("reference", "metadata") if name in record}
    told |= {"rewards": dict(record["rewards"])} if "rewards" in record else {}
    told |= {"fate": "dropped" if record["drop"] else "unused", "step": None, "attempt": None, "advantage": None}
    if record["purpose"] == "evaluation":
        version = record["newest_version"]
        told |= {"fate": "undone" if record["lease"] < redone.get(version, -1) else "evaluated", "step": version}
    elif known is not None:
        fate = "undone" if known["undone"] else "trained" if known["trained"][record["index"]] else "skipped"
        told |= {"fate": fate, "advantage": known["advantages"][record["index"]]}
        told |= {name: known[name] for name in ("step", "attempt")}
    return told


def counts(directory: Path, newest: int | None = None) -> Counter[str]:
    """`storage.parts.counts_of` all parts of samples, or of those in which `samples` looks for the `newest`."""
    total = Counter[str]()
    for path in _parts(directory, "samples", newest):
        with contextlib.suppress(FileNotFoundError), _opened(path) as file:
            total += counts_of(file.metadata)
    return total


def none_found(directory: Path, *, goes_on: bool = True) -> str:
    """Say why no sample is as asked for; `goes_on`: whether a run without a summary may still write some."""
    if not _parts(directory, "samples"):
        return _none_kept(directory / "job.json", directory / "summary.json", goes_on=goes_on)
    steps = sorted(each["step"] for each in _steps(directory).values())
    more = [f"steps {steps[0]} to {steps[-1]} were trained"] if steps else []
    return "; ".join(filter(None, ("no kept sample is as asked for", *more, damaged(directory))))


def _none_kept(job: Path, summary: Path, *, goes_on: bool) -> str:
    """Say why a run keeps no sample, by its job, and by its summary once it has ended."""
    if _told(job, "uses_rollouts") is False:
        return "the run has no samples: it learns from the dataset's own answers, and its model generates none"
    if _told(job, "recipe", "samples", "keep") == "none":
        return 'the run keeps no samples: samples.keep is "none"'
    if why := _told(summary, "problems", "samples that could not be written"):
        return f"no samples are kept: they could not be written: {why}"
    if number := _told(summary, "samples", "generated"):
        return f"the {number:,} samples of the run are not kept: an earlier release made it, or they were removed"
    if (outcome := _told(summary, "outcome")) or not goes_on:
        return f"no samples are kept: the run {outcome or 'ended without a word'} before any was written"
    steps = _told(job, "recipe", "warmup", "steps")
    after = f"after the {steps:,} steps of the warm-up, " if steps else ""
    first = f"no samples are kept yet: they come {after}as soon as the first prompt's are scored"
    return f"{first}; `cosmos status` tells how far the run is, and what is wrong with it"


def _told(file: Path, *keys: str) -> Any:
    """A value within a file of JSON; None where there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        return functools.reduce(operator.getitem, keys, json.loads(file.read_bytes()))
    return None
