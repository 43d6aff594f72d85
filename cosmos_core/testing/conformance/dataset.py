"""The kit for datasets."""

from __future__ import annotations

import base64
import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from cosmos_core.config.order import window_problem
from cosmos_core.errors import TransportError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Kind, Split
from cosmos_core.protocols.dataset import Omission
from cosmos_core.rollout.rewards.messages import TO_WORKER, Task
from cosmos_core.testing.conformance.plugin import PluginConformance, fault, fault_if, json_problems
from cosmos_core.testing.conformance.rows import (
    SPLITS,
    Place,
    Rows,
    as_sent,
    content_of,
    difference,
    places_by_position,
    read_elsewhere,
    read_row,
    read_rows,
    spread,
    take_row,
)
from cosmos_core.types import JSON, Prompt

_NUM_THREADS = 4
_NUM_READERS = 3
_NUM_PROMPTS = (1, 10, 100_000)


def size_problem(dataset: Dataset, split: Split) -> str:
    """Problems of the size of a split; empty if nothing is."""
    try:
        size: Any = dataset.size(split)
    except Exception as error:  # noqa: BLE001 - whatever it raises is told
        return f"size({split!r}) raised {type(error).__name__}: {error}; return 0 where the split does not exist"
    if not isinstance(size, int) or isinstance(size, bool):
        return f"size({split!r}) is {size!r:.100}, a {type(size).__name__}; return an int"
    return f"size({split!r}) is {size}; return 0 where the split does not exist" if size < 0 else ""


def location_problem(location: str) -> str:
    """Problems of where an image or a video is; empty if nothing is that can be known here."""
    scheme, colon, rest = location.partition(":")
    if scheme == "data" and colon:
        head, comma, data = rest.partition(",")
        if not comma or not head.endswith(";base64"):
            return "a data URL without base64; write data:TYPE;base64,DATA"
        try:
            base64.b64decode(data, validate=True)
        except ValueError as error:
            return f"a data URL that is no base64: {error}"
        return ""
    if "://" in location:
        return ""
    path = Path(location)
    if not path.is_absolute():
        return "a relative path, which is another one in another folder; give Path(…).absolute()"
    return "" if path.exists() else "and there is no such file"


def omission_problems(omissions: Any) -> Iterator[str]:
    """Problems of the counts of rows that are left out."""
    if not isinstance(omissions, tuple) or not all(isinstance(each, Omission) for each in omissions):
        yield f"{omissions!r:.100}; return a tuple of cosmos_core.protocols.dataset.Omission"
        return
    for each in omissions:
        if not isinstance(each.num_rows, int) or each.num_rows < 1 or not each.reason:
            yield f"{each!r:.200}; give a reason, and how many rows there are of it: 1 or more"
    reasons = [each.reason for each in omissions]
    for reason in dict.fromkeys(reason for reason in reasons if reasons.count(reason) > 1):
        yield f"{reason!r} is counted twice; add the rows up"


def _containers(row: Prompt) -> Iterator[tuple[str, Any]]:
    """(field, list or dict) of everything in a row that can change."""
    waiting: list[tuple[str, Any]] = [("metadata", row.metadata), ("reference", row.reference)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, list | dict):
            yield name, value
            waiting += [(name, item) for item in (value.values() if isinstance(value, dict) else value)]


def _row_problems(row: Prompt) -> Iterator[str]:
    """Reasons why models, rewards and reports, which are in other processes, cannot take a row as it is."""
    if row.text == ():
        yield "text is a chat without turns; give one Message at least"
    yield from json_problems(row.reference, "reference")
    metadata = dict(row.metadata) if isinstance(row.metadata, Mapping) else row.metadata
    yield from json_problems(metadata, "metadata")
    task = Task(ticket=0, reward=0, prompt=row, text="", num_units=0, truncated=False, turns=(), payload=None)
    try:
        received = TO_WORKER.decode(TO_WORKER.encode(task)).prompt
    except (TypeError, ValueError, OverflowError, TransportError) as error:
        yield f"it cannot be sent to a reward: {error}; give what cosmos_core.types.Prompt says"
        return
    for name in attrs.fields_dict(Prompt):
        given, got = getattr(row, name), getattr(received, name)
        if given != got:
            yield f"{name} is {given!r:.100}, but a reward gets {got!r:.100}; give what cosmos_core.types.Prompt says"
    for location in received.media:
        if problem := location_problem(location):
            yield f"media has {location!r:.100}, {problem}"


def _settled(dataset: Dataset) -> dict[str, Any]:
    """What planning asks for once: sizes, rows left out, and the windows of stages."""
    found: dict[str, Any] = {f"size({split!r})": dataset.size(split) for split in SPLITS}
    if hasattr(dataset, "omitted"):
        found |= {f"omitted({split!r})": dataset.omitted(split) for split in SPLITS}
    if hasattr(dataset, "windows"):
        found |= {f"windows({number})": dataset.windows(number) for number in _NUM_PROMPTS}
    return found


def _undeclared(capabilities: DatasetCapabilities, rows: Rows) -> Iterator[str]:
    """Differences between what rows have and what is declared."""
    fields = {"demonstrations": "demonstration", "references": "reference", "preferences": "rejected"}
    for what, field in fields.items():
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


def _unpaired(rows: Rows) -> Iterator[str]:
    """Rejected completions without another one that is preferred to them."""
    for (split, index), row in rows.items():
        if row.rejected is not None and row.demonstration in (None, row.rejected):
            yield (
                f"row {index} of {split} has the rejected completion {row.rejected!r:.100} and the demonstration "
                f"{row.demonstration!r:.100}; give both, and two that differ"
            )


def _expect_refusal(dataset: Dataset, place: Place, size: int) -> None:
    split, index = place
    try:
        row = dataset.row(split, index)
    except IndexError:
        return
    except Exception as error:  # noqa: BLE001 - whatever it raises is told
        fault(f"row({split!r}, {index}) of {size} rows raised {type(error).__name__}: {error}; raise IndexError")
    fault(
        f"row({split!r}, {index}) of {size} rows is {row!r:.100}; raise IndexError unless 0 <= index < self.size(split)"
    )


def _generator_states(*, draw: bool = False) -> dict[str, Any]:
    """State of each global generator that is in use, after one draw if wanted."""
    if draw:
        random.random()  # noqa: S311 - no secret
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        generator = sys.modules["numpy"].random
        if draw:
            generator.random()
        kind, keys, *rest = generator.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        if draw:
            torch.rand(())
        states["torch"] = torch.get_rng_state().tolist()
    return states


def _differences_of_threads(dataset: Dataset, rows: Rows) -> Iterator[str]:
    """Differences of rows that several threads read at once."""
    places = list(rows)
    turns = [places[start:] + places[:start] for start in range(0, len(places), len(places) // _NUM_THREADS or 1)]
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for found in threads.map(lambda turn: read_rows(dataset, turn), turns):
            yield difference(rows, found, "if several threads read at once", "guard what they share")


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
    def dataset(self, make: Callable[..., Any]) -> Dataset:
        """The dataset."""
        made: Dataset = make()
        return made

    @pytest.fixture
    def sizes(self, dataset: Dataset) -> dict[Split, int]:
        """Rows of each split, if they are numbers."""
        if any(size_problem(dataset, split) for split in SPLITS):
            pytest.skip("its sizes are no sizes; test_what_planning_asks_is_settled says why")
        return {split: dataset.size(split) for split in SPLITS}

    @pytest.fixture
    def places(self, sizes: dict[Split, int]) -> list[Place]:
        """The rows that the tests read, split after split in order: at most `num_rows` of each."""
        return [(split, index) for split, size in sizes.items() for index in spread(size, self.num_rows)]

    @pytest.fixture
    def rows(self, dataset: Dataset, places: list[Place]) -> Rows:
        """Those rows, if they can be read."""
        try:
            return read_rows(dataset, places)
        except pytest.fail.Exception:
            pytest.skip("its rows cannot be read; test_rows_are_prompts says why")

    def test_what_planning_asks_is_settled(self, dataset: Dataset, make: Callable[..., Any]) -> None:
        """Sizes, counts of rows left out and windows go into the plan, in several processes and after a restart."""
        fault_if(size_problem(dataset, split) for split in SPLITS)
        num_rows = dataset.size("train")
        if num_rows == 0:
            fault("size('train') is 0; override the fixture `options` so that there are rows to test")
        first = _settled(dataset)
        for name, value in first.items():
            if name.startswith("omitted"):
                fault_if(f"{name}: {problem}" for problem in omission_problems(value))
            if name.startswith("windows") and (problem := window_problem(value, num_rows)):
                fault(f"{name}: {problem}")
        with contextlib.suppress(pytest.fail.Exception):
            read_rows(dataset, [("train", index) for index in spread(num_rows, self.num_rows)])
        for when, again in {"after rows were read": dataset, "of another instance": make()}.items():
            for name, value in _settled(again).items():
                if value != first[name]:
                    seen = f"{first[name]!r:.100} at first and {value!r:.100} {when}"
                    fault(f"{name} is {seen}; settle it when the dataset is made")

    def test_rows_are_prompts_that_can_be_sent(
        self, dataset: Dataset, places: list[Place], capabilities: DatasetCapabilities
    ) -> None:
        """Models, rewards and reports take them as they are, and recipes are accepted by what is declared of them."""
        rows = read_rows(dataset, places)
        for (split, index), row in rows.items():
            fault_if(f"row {index} of {split}: {problem}" for problem in _row_problems(row))
        fault_if((*_unpaired(rows), *_undeclared(capabilities, rows)))

    def test_each_row_comes_once(self, dataset: Dataset, sizes: dict[Split, int], rows: Rows) -> None:
        """A size that counts rows twice makes epochs longer than the data; validation on train rows measures memory."""
        for split, size in sizes.items():
            contents = [content_of(row) for (where, _), row in rows.items() if where == split]
            if size > 1 and len(set(contents)) == 1:
                fault(f"all {len(contents)} rows of {split} that were read are the same; does row() use its index?")
            repeated = len(contents) - len(set(contents))
            if split == "train" and 2 * repeated > len(contents) and not self.repeats_rows:
                fault(
                    f"{repeated} of the {len(contents)} train rows that were read repeat an earlier one, and "
                    f"size('train') is {size}; give a number to each row once, or set repeats_rows = True in the test "
                    "class if they are meant to come again"
                )
        if not sizes["heldout"] or self.holds_out_train_rows:
            return
        held_out = [(index, row) for (split, index), row in rows.items() if split == "heldout"]
        # Where a slice of the train rows would lie: at the same numbers, or as far from the end.
        shifts = (0, sizes["train"] - sizes["heldout"])
        near: set[Place] = {("train", index + shift) for index, _ in held_out for shift in shifts}
        readable = [place for place in near if 0 <= place[1] < sizes["train"]]
        others = [row for (split, _), row in rows.items() if split == "train"]
        trained = {content_of(row) for row in (*others, *read_rows(dataset, readable).values())}
        both = [index for index, row in held_out if content_of(row) in trained]
        if 2 * len(both) > len(held_out):
            fault(
                f"{len(both)} of the {len(held_out)} held-out rows that were read are train rows too, row {both[0]} "
                "for example; does row() use its split? Keep them apart, or set holds_out_train_rows = True in the "
                "test class if it is meant"
            )

    def test_reading_a_row_changes_nothing_else(self, dataset: Dataset, rows: Rows) -> None:
        """A note on one row must not appear on another, and others draw from the process's random generators."""
        # One draw first: an earlier test may have left the very state that reading leads to.
        before = _generator_states(draw=True)
        read_rows(dataset, rows)
        for name, state in _generator_states().items():
            if state != before.get(name, state):
                fault(
                    f"reading rows draws from or seeds the global generator of {name}; "
                    "make one of its own: random.Random(…), torch.Generator()"
                )
        taken = {place: take_row(dataset, place) for place in rows}
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

    def test_a_row_is_the_same_whenever_it_is_read(
        self, dataset: Dataset, make: Callable[..., Any], sizes: dict[Split, int], context: DatasetContext, rows: Rows
    ) -> None:
        """Prompts are leased again, drawn in an order of the run, shared by replicas and read by threads."""
        several = [make() for _ in range(_NUM_READERS)]
        shared = {place: read_row(several[index % _NUM_READERS], place) for index, place in enumerate(rows)}
        # Two epochs in the order of a run, or the first positions of it; a resumed run begins in the middle.
        positions = range(min(2 * sizes["train"], self.num_rows))
        order = places_by_position(positions, sizes["train"], context.seed)
        middle = len(order) // 2
        fault_if(
            (
                difference(rows, read_rows(dataset, rows), "at a second call"),
                difference(rows, read_rows(make(), reversed(rows)), "if the rows are read backwards"),
                difference(rows, shared, f"if {_NUM_READERS} readers share the rows"),
                difference(
                    read_rows(make(), order),
                    read_rows(make(), order[middle:]),
                    f"if a run resumes at position {middle}",
                ),
                *_differences_of_threads(dataset, rows),
            )
        )

    def test_a_row_is_the_same_wherever_it_is_read(
        self, plugins: PluginSet, options: Mapping[str, JSON], context: DatasetContext, dataset: Dataset, rows: Rows
    ) -> None:
        """Roles and resumed runs make the dataset for themselves; one of another seed beside it changes nothing."""
        other_context = attrs.evolve(context, seed=context.seed + 1)
        first, second = (plugins.create("dataset", self.plugin, options, other_context) for _ in range(2))
        found: dict[str, Rows] = {"first": {}, "here": {}, "second": {}}
        readable = [(split, index) for split, index in rows if index < first.size(split)]
        for place in readable:
            for name, each in (("first", first), ("here", dataset), ("second", second)):
                found[name][place] = read_row(each, place)
        beside = "once a dataset of another seed is read too"
        again = f"from another instance of seed {other_context.seed}"
        fault_if(
            (
                difference(rows, found["here"], beside, "keep nothing in globals"),
                difference(found["first"], found["second"], again),
            )
        )
        here = {place: as_sent(row) for place, row in rows.items()}
        there = read_elsewhere(self.plugin, options, context, list(rows))
        fault_if([difference(here, there, "in another process", "use no hash(), no order of a set, no clock")])

    def test_an_index_out_of_range_is_refused(self, dataset: Dataset, sizes: dict[Split, int]) -> None:
        """A negative index would silently be a row counted from the end."""
        for split, size in sizes.items():
            for index in (-1, -size - 1, size, size + 1000):
                _expect_refusal(dataset, (split, index), size)
