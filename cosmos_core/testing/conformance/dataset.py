"""The kit for datasets.

`python -m cosmos_core.testing.conformance.dataset REQUEST ROWS` reads rows in another process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import attrs
import msgspec
import numpy as np
import pytest

from cosmos_core.config.order import window_problem
from cosmos_core.errors import DataError, TransportError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Completion, Dataset, DatasetCapabilities, DatasetContext, Kind, Split
from cosmos_core.protocols.dataset import Omission
from cosmos_core.rollout.rewards.messages import TO_WORKER, Task
from cosmos_core.testing.conformance.plugin import Make, PluginConformance, fault, fault_if, json_problem, told_by
from cosmos_core.testing.conformance.processes import exchange
from cosmos_core.types import JSON, Prompt

Place: TypeAlias = tuple[Split, int]
Rows: TypeAlias = dict[Place, Prompt]

_SPLITS: Final[tuple[Split, ...]] = ("train", "heldout")
_EDGE: Final = 4
_NUM_THREADS: Final = 4
_NUM_PROMPTS: Final = (1, 10, 100_000)
_TIMEOUT_S: Final = 120.0
_TAIL: Final = 2000


class DatasetConformance(PluginConformance):
    """Tests that every dataset must pass: numbered rows, the same ones whenever, wherever and in whatever order.

    Set `plugin`, and what else the defaults do not do for.

    Attributes:
        num_rows: How many rows of each split the tests read, from both ends and between.
        repeats_rows: Whether most train rows may come again under another number, as when a few prompts are drawn from.
        holds_out_train_rows: Whether held-out rows may be train rows, as when a run shall learn a few rows by heart.

    Fixtures to override: `options`, the options to test with; `context`, whose `directory` is where relative paths
    start, the empty `tmp_path` by default. Write files there in `options` if the dataset reads some.
    """

    kind: ClassVar[Kind] = "dataset"
    num_rows: ClassVar[int] = 48
    repeats_rows: ClassVar[bool] = False
    holds_out_train_rows: ClassVar[bool] = False

    @pytest.fixture
    def context(self, plugins: PluginSet, tmp_path: Path) -> DatasetContext:
        """A dataset's context: seed 0, and an empty folder for the recipe's."""
        return dataset_context(plugins, 0, tmp_path)

    @pytest.fixture
    def dataset(self, make: Make) -> Dataset:
        """The dataset."""
        made: Dataset = make()
        return made

    @pytest.fixture
    def sizes(self, dataset: Dataset) -> dict[Split, int]:
        """Rows of each split, if they are numbers."""
        with told_by("test_what_planning_asks_is_settled"):
            return {split: _size(dataset, split) for split in _SPLITS}

    @pytest.fixture
    def places(self, sizes: dict[Split, int]) -> list[Place]:
        """The rows that the tests read, split after split in order: at most `num_rows` of each."""
        return [(split, index) for split, size in sizes.items() for index in _spread(size, self.num_rows)]

    @pytest.fixture
    def rows(self, dataset: Dataset, places: list[Place]) -> Rows:
        """The rows at these places, if they can be read and sent."""
        with told_by("test_rows_are_prompts_that_can_be_sent"):
            rows = _read(dataset, places)
            fault_if(problem for row in rows.values() for problem in _row_problems(row))
            return rows

    def test_what_planning_asks_is_settled(self, dataset: Dataset, make: Make) -> None:
        """Sizes, counts of rows left out and windows go into the plan, in several processes and after a restart."""
        first = _settled(dataset)
        if first["size('train')"] == 0:
            fault("size('train') is 0; override the fixture `options` so that there are rows to test")
        with contextlib.suppress(pytest.fail.Exception):
            _read(dataset, [("train", index) for index in _spread(dataset.size("train"), self.num_rows)])
        for when, again in {"after rows were read": dataset, "of another instance": make()}.items():
            for name, value in _settled(again).items():
                if value != first[name]:
                    seen = f"{first[name]!r:.100} at first and {value!r:.100} {when}"
                    fault(f"{name} is {seen}; settle it when the dataset is made")

    def test_rows_are_prompts_that_can_be_sent(
        self, dataset: Dataset, places: list[Place], capabilities: DatasetCapabilities
    ) -> None:
        """Models, rewards and reports take them as they are, and recipes are accepted by what is declared of them."""
        rows = _read(dataset, places)
        for (split, index), row in rows.items():
            fault_if(f"row {index} of {split}: {problem}" for problem in _row_problems(row))
        fault_if(_undeclared(capabilities, rows))

    def test_each_row_comes_once(self, dataset: Dataset, sizes: dict[Split, int], rows: Rows) -> None:
        """A size that counts rows twice makes epochs longer than the data; validation on train rows measures memory."""
        contents = {split: [_content(row) for (where, _), row in rows.items() if where == split] for split in _SPLITS}
        for split, found in contents.items():
            if sizes[split] > 1 and len(set(found)) == 1:
                fault(f"all {len(found)} rows of {split} that were read are the same; does row() use its index?")
        trained = contents["train"]
        repeated = len(trained) - len(set(trained))
        if 2 * repeated > len(trained) and not self.repeats_rows:
            fault(
                f"{repeated} of the {len(trained)} train rows that were read repeat an earlier one, and size('train') "
                f"is {sizes['train']}; give a number to each row once, or set repeats_rows = True in the test class if "
                "they are meant to come again"
            )
        # Where a slice of the train rows would lie: at the same numbers, or as far from the end.
        size, shifts = sizes["train"], (0, sizes["train"] - sizes["heldout"])
        held_out, numbers = contents["heldout"], [index for split, index in rows if split == "heldout"]
        near: set[Place] = {
            ("train", index + shift) for index in numbers for shift in shifts if 0 <= index + shift < size
        }
        seen = {*trained, *map(_content, _read(dataset, near).values())}
        both = [index for index, content in zip(numbers, held_out, strict=True) if content in seen]
        if 2 * len(both) > len(held_out) and not self.holds_out_train_rows:
            fault(
                f"{len(both)} of the {len(held_out)} held-out rows that were read are train rows too, row {both[0]} "
                "for example; does row() use its split? Keep them apart, or set holds_out_train_rows = True in the "
                "test class if it is meant"
            )

    def test_reading_a_row_changes_nothing_else(self, dataset: Dataset, rows: Rows) -> None:
        """A note on one row must not appear on another, and others draw from the process's random generators."""
        # One draw first: an earlier test may have left the very state that reading leads to.
        for draw, _ in (generators := _generators()).values():
            draw()
        before = {name: state() for name, (_, state) in generators.items()}
        taken = {place: _take(dataset, place) for place in rows}
        if drawn := [name for name, (_, state) in generators.items() if state() != before[name]]:
            fault(
                f"reading rows draws from or seeds the global generator of {', '.join(drawn)}; "
                "make one of its own: random.Random(…), torch.Generator()"
            )
        owners: dict[int, Place] = {}
        for place, row in taken.items():
            if row != rows[place]:
                changed = f"row {place[1]} of {place[0]} changed when others were read"
                fault(f"{changed}; make new lists and dicts for each row")
            for name, container in _containers(row):
                owner = owners.setdefault(id(container), place)
                if owner != place:
                    what = f"{type(container).__name__} in their {name}"
                    fault(f"row{owner} and row{place} hold the same {what}; make a new one for each row")

    def test_a_row_is_the_same_whenever_it_is_read(self, dataset: Dataset, make: Make, rows: Rows) -> None:
        """Prompts are leased again, drawn in an order of the run, shared by replicas and read by threads."""
        places = list(rows)
        turns = [places[start:] + places[:start] for start in range(0, len(places), len(places) // _NUM_THREADS or 1)]
        found = [
            _difference(rows, _read(dataset, rows), "at a second call"),
            _difference(rows, _read(make(), reversed(rows)), "if the rows are read backwards"),
        ]
        when, advice = "if several threads read at once", "guard what they share"
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            read = threads.map(functools.partial(_read, dataset), turns)
            found += [_difference(rows, each, when, advice) for each in read]
        fault_if(found)

    def test_a_row_is_the_same_wherever_it_is_read(
        self, plugins: PluginSet, options: Mapping[str, JSON], context: DatasetContext, dataset: Dataset, rows: Rows
    ) -> None:
        """Roles and resumed runs make the dataset for themselves; one of another seed beside it changes nothing."""
        other_context = attrs.evolve(context, seed=context.seed + 1)
        other, again = (plugins.create("dataset", self.plugin, options, other_context) for _ in range(2))
        here: Rows = {}
        beside: Rows = {}
        for split, index in rows:
            beside |= _read(other, [(split, index)] if index < other.size(split) else [])
            here |= _read(dataset, [(split, index)])
        fault_if(
            [
                _difference(beside, _read(again, beside), f"from another instance of seed {other_context.seed}"),
                _difference(rows, here, "once a dataset of another seed is read too", "keep nothing in globals"),
            ]
        )
        there = read_elsewhere(self.plugin, options, context, list(rows))
        fault_if([_difference(rows, there, "in another process", "use no hash(), no order of a set, no clock")])

    def test_an_index_out_of_range_is_refused(self, dataset: Dataset, sizes: dict[Split, int]) -> None:
        """A negative index would silently be a row counted from the end."""
        for split, size in sizes.items():
            for index in (-1, -size - 1, size, size + 1000):
                try:
                    seen = f"is {dataset.row(split, index)!r:.100}"
                except IndexError:
                    continue
                except Exception as error:  # noqa: BLE001 - whatever it raises is told
                    seen = f"raised {type(error).__name__}: {error}"
                wanted = "raise IndexError unless 0 <= index < self.size(split)"
                fault(f"row({split!r}, {index}) of {size} rows {seen}; {wanted}")


def _size(dataset: Dataset, split: Split) -> int:
    wanted = "return an int, 0 where the split does not exist"
    try:
        size: Any = dataset.size(split)
    except Exception as error:  # noqa: BLE001 - whatever it raises is told
        fault(f"size({split!r}) raised {type(error).__name__}: {error}; {wanted}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        fault(f"size({split!r}) is {size!r:.100}, a {type(size).__name__}; {wanted}")
    return size


def _settled(dataset: Dataset) -> dict[str, Any]:
    """All that planning asks for once: sizes, rows left out, and the windows of stages."""
    found: dict[str, Any] = {f"size({split!r})": _size(dataset, split) for split in _SPLITS}
    if hasattr(dataset, "omitted"):
        for split in _SPLITS:
            found[f"omitted({split!r})"] = omitted = dataset.omitted(split)
            if not _tells_of_each_once(omitted):
                fault(
                    f"omitted({split!r}) is {omitted!r:.200}; return a tuple of cosmos_core.protocols.dataset.Omission"
                    ", each with a reason of its own, and how many rows there are of it: 1 or more"
                )
    if hasattr(dataset, "windows") and dataset.size("train"):
        for number in _NUM_PROMPTS:
            found[f"windows({number})"] = windows = dataset.windows(number)
            if problem := window_problem(windows, dataset.size("train")):
                fault(f"windows({number}): {problem}")
    return found


def _tells_of_each_once(omissions: Any) -> bool:
    """True if it tells of rows that are left out, each once."""
    if not isinstance(omissions, tuple) or not all(isinstance(each, Omission) for each in omissions):
        return False
    told = {each.reason for each in omissions if isinstance(each.num_rows, int) and each.num_rows > 0}
    return "" not in told and len(told) == len(omissions)


def _spread(size: int, most: int) -> Sequence[int]:
    """Up to `most` of the numbers in `range(size)`: neighbours at both ends, and what lies evenly between them."""
    if size <= most:
        return range(size)
    edge = min(_EDGE, most // 2)
    between = most - 2 * edge
    middle = [edge + index * (size - 2 * edge) // between for index in range(between)]
    return sorted({*range(edge), *middle, *range(size - edge, size)})


def _take(dataset: Dataset, place: Place) -> Prompt:
    """One row, the very object."""
    split, index = place
    try:
        row = dataset.row(split, index)
    except Exception as error:  # noqa: BLE001 - whatever it raises is told
        size = dataset.size(split)
        fault(f"row({split!r}, {index}) raised {type(error).__name__}: {error}; its size says there are {size} rows")
    if not isinstance(row, Prompt):
        fault(f"row({split!r}, {index}) is a {type(row).__name__}: {row!r:.100}; return a cosmos_core.types.Prompt")
    return row


def _read(dataset: Dataset, places: Iterable[Place]) -> Rows:
    """Some rows, each as it is when it is read: a copy, so that later changes to it show."""
    return {place: copy.deepcopy(_take(dataset, place)) for place in places}


def _content(row: Prompt) -> str:
    """The content of a row that a model and a reward see: two rows of one content are one row read twice."""
    return repr((row.text, row.demonstration, row.rejected, row.reference, row.media))


def _difference(first: Rows, second: Rows, when: str, advice: str = "") -> str:
    """Tell of the first row of `second` that is another one in `first`; empty if none is."""
    for (split, index), row in second.items():
        expected = first[split, index]
        for name in attrs.fields_dict(Prompt):
            values = getattr(expected, name), getattr(row, name)
            if values[0] != values[1]:
                seen = f"its {name} is {values[0]!r:.100}, then {values[1]!r:.100}"
                advice = advice or "make a row from the options, the seed, the split and the index alone"
                return f"row {index} of {split} is another one {when}: {seen}; {advice}"
    return ""


def _row_problems(row: Prompt) -> Iterator[str]:
    """Reasons why models, rewards and reports, which are in other processes, cannot take a row as it is."""
    if row.text == ():
        yield "text is a chat without turns; give one Message at least"
    metadata = dict(row.metadata) if isinstance(row.metadata, Mapping) else row.metadata
    yield from filter(None, (json_problem(row.reference, "reference"), json_problem(metadata, "metadata")))
    task = Task(ticket=0, reward=0, completion=Completion(prompt=row, text=""))
    wanted = "give what cosmos_core.types.Prompt says"
    try:
        received = TO_WORKER.decode(TO_WORKER.encode(task)).completion.prompt
    except (TypeError, ValueError, OverflowError, TransportError) as error:
        yield f"it cannot be sent to a reward: {error}; {wanted}"
        return
    for name in attrs.fields_dict(Prompt):
        given, got = getattr(row, name), getattr(received, name)
        if given != got:
            yield f"{name} is {given!r:.100}, but a reward gets {got!r:.100}; {wanted}"
    yield from filter(None, map(_location_problem, received.media))
    if row.rejected is not None and row.demonstration in (None, row.rejected):
        values = f"{row.rejected!r:.100} and the demonstration {row.demonstration!r:.100}"
        yield f"it has the rejected completion {values}; give both, and two that differ"


def _location_problem(location: str) -> str:
    """Problems of where an image or a video is; empty if nothing is that can be known here."""
    if location.startswith("data:"):
        from cosmos_core.models.vision.images import inline_bytes  # noqa: PLC0415 - Pillow is for rows with media

        try:
            inline_bytes(location, "data:", "in base64, data:TYPE;base64,DATA")
        except DataError as error:
            return str(error)
        return ""
    if "://" in location:
        return ""
    if not Path(location).is_absolute():
        return f"media has {location!r:.100}, which is another file in another folder; give Path(…).absolute()"
    return "" if Path(location).exists() else f"media has {location!r:.100}, and there is no such file"


def _undeclared(capabilities: DatasetCapabilities, rows: Rows) -> Iterator[str]:
    for what, field in (("demonstrations", "demonstration"), ("references", "reference"), ("preferences", "rejected")):
        found = [place for place, row in rows.items() if getattr(row, field) is not None]
        declared = getattr(capabilities, what)
        if declared and what != "preferences" and not any(split == "train" for split, _ in found):
            yield (
                f"it declares {what}, but none of the train rows that were read has one; "
                f"give them, override the fixture `options`, or declare DatasetCapabilities({what}=False)"
            )
        if found and not declared:
            split, index = found[0]
            has = "a rejected completion" if field == "rejected" else f"a {field}"
            yield f"row {index} of {split} has {has}, but they are not declared: DatasetCapabilities({what}=True)"


def _containers(row: Prompt) -> Iterator[tuple[str, Any]]:
    """(field, list or dict) of everything in a row that can change."""
    waiting: list[tuple[str, Any]] = [("metadata", row.metadata), ("reference", row.reference)]
    for name, value in waiting:
        if isinstance(value, list | dict):
            yield name, value
            waiting += [(name, item) for item in (value.values() if isinstance(value, dict) else value)]


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Functions that draw from each global generator that is in use, and that tell its state."""
    found: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "random": (random.random, random.getstate),
        "numpy.random": (np.random.random, lambda: repr(np.random.get_state(legacy=False))),  # noqa: NPY002
    }
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = lambda: torch.rand(()), lambda: torch.get_rng_state().tolist()
    return found


def read_elsewhere(plugin: str, options: Mapping[str, JSON], context: DatasetContext, places: Sequence[Place]) -> Rows:
    """Some rows as another process with another hash seed reads them."""
    rows, code, output = exchange(
        __name__,
        [plugin, dict(options), context.seed, str(context.directory), *places],
        list[Prompt],
        timeout_s=_TIMEOUT_S,
        environment={"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1", "OMP_NUM_THREADS": "1"},
        folder=Path.cwd(),
    )
    if code is None:
        fault(
            f"another process did not read {len(places)} rows in {_TIMEOUT_S:g} s, which this one reads; wait for "
            "nothing in __init__ and row() that only one process can have (a lock, a port)"
        )
    if code or rows is None:
        fault(f"another process could not read the rows that this one reads:\n{output.strip()[-_TAIL:]}")
    return dict(zip(places, rows, strict=True))


def _main(question: Path, answer: Path) -> None:
    plugin, options, seed, directory, *places = msgspec.json.decode(question.read_bytes())
    plugins = PluginSet.load([("dataset", plugin)])
    dataset: Dataset = plugins.create("dataset", plugin, options, dataset_context(plugins, seed, Path(directory)))
    answer.write_bytes(msgspec.json.encode([dataset.row(split, index) for split, index in places]))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
