"""The kit for datasets."""

from __future__ import annotations

import base64
import random
import sys
from collections import Counter
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
from cosmos_core.protocols.dataset import Omission, Omitting, Paced
from cosmos_core.rollout.rewards.messages import TO_WORKER, Task
from cosmos_core.testing.conformance.plugin import PluginConformance, fault, json_problems
from cosmos_core.testing.conformance.rows import (
    PURE,
    SPLITS,
    Place,
    Rows,
    as_sent,
    compare,
    content_of,
    places_by_position,
    read_elsewhere,
    read_row,
    read_rows,
    spread,
    take_row,
)
from cosmos_core.types import JSON, Message, Prompt


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


def _type_problems(row: Any) -> Iterator[str]:
    """Fields of a row that are not what `Prompt` says; nothing checks that when one is made."""
    turns = row.text if isinstance(row.text, tuple) else ()
    if not isinstance(row.text, str | tuple) or not all(isinstance(turn, Message) for turn in turns):
        yield f"text is {row.text!r:.100}; give a str, or a tuple of cosmos_core.types.Message"
    if row.text == ():
        yield "text is a chat without turns; give one Message at least"
    for turn in turns:
        if not isinstance(turn.role, str) or not isinstance(turn.content, str):
            yield f"text has the turn {turn!r:.100}; its role and content are str"
    if not isinstance(row.demonstration, str | None):
        yield f"demonstration is {row.demonstration!r:.100}; give a str, or None"
    if not isinstance(row.rejected, str | None):
        yield f"rejected is {row.rejected!r:.100}; give a str, or None"
    if not isinstance(row.media, tuple) or not all(isinstance(each, str) for each in row.media):
        yield f"media is {row.media!r:.100}; give a tuple of paths or URLs, each a str"
    if not isinstance(row.metadata, dict):
        yield f"metadata is {row.metadata!r:.100}; give a dict"


def _containers(row: Prompt) -> Iterator[tuple[str, Any]]:
    """(field, list or dict) of everything in a row that can change."""
    waiting: list[tuple[str, Any]] = [("metadata", row.metadata), ("reference", row.reference)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, list | dict):
            yield name, value
            waiting += [(name, item) for item in (value.values() if isinstance(value, dict) else value)]


_NUM_THREADS = 4
_NUM_READERS = 3
_MANY_PROMPTS = 100_000


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
            pytest.skip("its sizes are no sizes; test_sizes_are_numbers says why")
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

    def test_sizes_are_numbers(self, dataset: Dataset) -> None:
        """Planning counts rows before anything is read; a split that does not exist has none."""
        for split in SPLITS:
            problem = size_problem(dataset, split)
            if problem:
                fault(problem)

    def test_there_are_rows_to_train_on(self, sizes: dict[Split, int]) -> None:
        """A run without any is refused."""
        if sizes["train"] == 0:
            fault("size('train') is 0; override the fixture `options` so that there are rows to test")

    def test_sizes_stay(self, dataset: Dataset, make: Callable[..., Any], sizes: dict[Split, int], rows: Rows) -> None:
        """The order of a run is drawn from the size, in several processes and again after a restart."""
        read_rows(dataset, rows)
        other: Dataset = make()
        for split, size in sizes.items():
            seen = {"after rows were read": dataset.size(split), "of another instance": other.size(split)}
            for when, again in seen.items():
                if again != size:
                    fault(f"size({split!r}) is {size} at first and {again} {when}; settle it when the dataset is made")

    def test_rows_are_prompts(self, dataset: Dataset, places: list[Place]) -> None:
        """Models, rewards and reports take them as they are."""
        for (split, index), row in read_rows(dataset, places).items():
            for problem in _type_problems(row):
                fault(f"row {index} of {split}: {problem}")

    def test_references_and_metadata_are_plain_json(self, rows: Rows) -> None:
        """Rewards run in other processes."""
        for (split, index), row in rows.items():
            metadata = dict(row.metadata)
            for problem in (*json_problems(row.reference, "reference"), *json_problems(metadata, "metadata")):
                fault(f"row {index} of {split}: {problem}")

    def test_what_rows_show_can_be_found(self, rows: Rows) -> None:
        """A model reads it in another process, in a folder of its own."""
        for (split, index), row in rows.items():
            for location in row.media:
                if problem := location_problem(location):
                    fault(f"row {index} of {split}: media has {location!r:.100}, {problem}")

    def test_a_row_reaches_a_reward_unchanged(self, rows: Rows) -> None:
        """A row that cannot be sent to a worker cannot be scored."""
        for (split, index), row in rows.items():
            task = Task(ticket=0, reward=0, prompt=row, text="", num_units=0, truncated=False, turns=(), payload=None)
            try:
                received = TO_WORKER.decode(TO_WORKER.encode(task)).prompt
            except (TypeError, ValueError, OverflowError, TransportError) as error:
                fault(
                    f"row {index} of {split} cannot be sent to a reward: {error}; keep to text, numbers, lists, dicts"
                )
            if received != row:
                fault(
                    f"row {index} of {split} is {row!r:.200}, but a reward gets {received!r:.200}; keep to plain JSON"
                )

    def test_rows_differ(self, sizes: dict[Split, int], rows: Rows) -> None:
        """A row is found by its number."""
        for split, size in sizes.items():
            indices = [index for where, index in rows if where == split]
            if size > 1 and all(rows[split, index] == rows[split, indices[0]] for index in indices):
                fault(f"all {len(indices)} rows of {split} that were read are the same; does row() use its index?")

    def test_few_train_rows_come_twice(self, sizes: dict[Split, int], rows: Rows) -> None:
        """A size that counts rows several times makes an epoch longer than the data."""
        if self.repeats_rows:
            pytest.skip("repeats_rows is set")
        contents = [content_of(row) for (split, _), row in rows.items() if split == "train"]
        repeated = len(contents) - len(set(contents))
        if 2 * repeated > len(contents):
            fault(
                f"{repeated} of the {len(contents)} train rows that were read repeat an earlier one, and size('train') "
                f"is {sizes['train']}; give a number to each row once, or set repeats_rows = True in the test class "
                "if they are meant to come again"
            )

    def test_held_out_rows_are_no_train_rows(self, dataset: Dataset, sizes: dict[Split, int], rows: Rows) -> None:
        """A validation on what was trained on measures memory."""
        if not sizes["heldout"] or self.holds_out_train_rows:
            pytest.skip("there are no held-out rows" if not sizes["heldout"] else "holds_out_train_rows is set")
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

    def test_a_row_stays_as_it_was_read(self, dataset: Dataset, rows: Rows) -> None:
        """A batch holds many rows at once."""
        taken = {place: take_row(dataset, place) for place in rows}
        for (split, index), row in taken.items():
            if row != rows[split, index]:
                fault(f"row {index} of {split} changed when others were read; make new lists and dicts for each row")

    def test_rows_share_nothing_that_can_change(self, dataset: Dataset, rows: Rows) -> None:
        """A note on one row must not appear on another."""
        taken = {place: take_row(dataset, place) for place in rows}
        owners: dict[int, Place] = {}
        for place, row in taken.items():
            for name, container in _containers(row):
                owner = owners.setdefault(id(container), place)
                if owner != place:
                    what = f"{type(container).__name__} in their {name}"
                    fault(f"row{owner} and row{place} hold the same {what}; make a new one for each row")

    def test_preferences_are_declared(self, capabilities: DatasetCapabilities, rows: Rows) -> None:
        """A rejected completion is nothing without the one preferred to it, and no use where nobody knows of it."""
        found = [place for place, row in rows.items() if row.rejected is not None]
        for split, index in found:
            row = rows[split, index]
            if row.demonstration is None or row.demonstration == row.rejected:
                fault(
                    f"row {index} of {split} has the rejected completion {row.rejected!r:.100} and the demonstration "
                    f"{row.demonstration!r:.100}; give both, and two that differ"
                )
        if found and not capabilities.preferences:
            split, index = found[0]
            fault(
                f"row {index} of {split} has a rejected completion, but they are not declared: "
                "DatasetCapabilities(preferences=True)"
            )

    def test_rows_that_are_left_out_are_counted(self, dataset: Dataset, make: Callable[..., Any], rows: Rows) -> None:
        """Nobody misses a row that nobody tells of; planning shows the counts."""
        if not isinstance(dataset, Omitting):
            pytest.skip("it leaves no rows out")
        first = {split: dataset.omitted(split) for split in SPLITS}
        for split, omissions in first.items():
            for problem in omission_problems(omissions):
                fault(f"omitted({split!r}): {problem}")
        read_rows(dataset, rows)
        other = make()
        for split, omissions in first.items():
            for when, again in (("after rows were read", dataset), ("of another instance", other)):
                if again.omitted(split) != omissions:
                    fault(
                        f"omitted({split!r}) is {omissions!r:.100} at first and {again.omitted(split)!r:.100} {when}; "
                        "settle it when the dataset is made"
                    )

    @pytest.mark.parametrize("what", ["demonstrations", "references"])
    def test_rows_have_what_is_declared(self, capabilities: DatasetCapabilities, rows: Rows, what: str) -> None:
        """A recipe whose algorithm or reward needs it is refused, or accepted, by what is declared."""
        field = what.removesuffix("s")
        found = [place for place, row in rows.items() if getattr(row, field) is not None]
        declared = getattr(capabilities, what)
        if declared and not any(split == "train" for split, _ in found):
            fault(
                f"it declares {what}, but none of the train rows that were read has one; "
                f"give them, override the fixture `options`, or declare DatasetCapabilities({what}=False)"
            )
        if found and not declared:
            split, index = found[0]
            fault(f"row {index} of {split} has a {field}, but they are not declared: DatasetCapabilities({what}=True)")

    @pytest.fixture
    def order(self, sizes: dict[Split, int], context: DatasetContext, rows: Rows) -> list[Place]:  # noqa: ARG002 - a condition
        """Train rows in the order of a run, if they can be read: two epochs, or the first `num_rows` positions."""
        size = sizes["train"]
        num_positions = min(2 * size, self.num_rows)
        return places_by_position(range(num_positions), size, context.seed)

    def test_a_row_is_the_same_at_each_call(self, dataset: Dataset, rows: Rows) -> None:
        """A prompt that is leased again is the same prompt."""
        compare(rows, read_rows(dataset, rows), "at a second call")

    def test_a_row_is_the_same_in_any_order(self, make: Callable[..., Any], rows: Rows) -> None:
        """The run draws its rows in an order of its own."""
        compare(rows, read_rows(make(), reversed(rows)), "if the rows are read backwards")

    def test_threads_read_the_same_rows(self, dataset: Dataset, rows: Rows) -> None:
        """A replica reads in several threads at once."""
        places = list(rows)
        turns = [places[start:] + places[:start] for start in range(0, len(places), len(places) // _NUM_THREADS or 1)]
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for found in threads.map(lambda turn: read_rows(dataset, turn), turns):
                compare(rows, found, "if several threads read at once", "guard what they share")

    def test_another_process_reads_the_same_rows(
        self, options: Mapping[str, JSON], context: DatasetContext, rows: Rows
    ) -> None:
        """The policy, the rollout replicas and a resumed run each make the dataset for themselves."""
        here = {place: as_sent(row) for place, row in rows.items()}
        there = read_elsewhere(self.plugin, options, context, list(rows))
        compare(here, there, "in another process", "use no hash(), no order of a set, no clock")

    def test_the_rows_of_a_seed_are_its_own(
        self, plugins: PluginSet, options: Mapping[str, JSON], context: DatasetContext, dataset: Dataset, rows: Rows
    ) -> None:
        """A dataset of another seed beside it changes nothing."""
        other_context = attrs.evolve(context, seed=context.seed + 1)
        first, second = (plugins.create("dataset", self.plugin, options, other_context) for _ in range(2))
        found: dict[str, Rows] = {"first": {}, "here": {}, "second": {}}
        readable = [(split, index) for split, index in rows if index < first.size(split)]
        for place in readable:
            for name, each in (("first", first), ("here", dataset), ("second", second)):
                found[name][place] = read_row(each, place)
        compare(rows, found["here"], "once a dataset of another seed is read too", "keep nothing in globals")
        compare(found["first"], found["second"], f"from another instance of seed {other_context.seed}")

    def test_it_leaves_the_random_generators_alone(self, dataset: Dataset, rows: Rows) -> None:
        """Others in the process draw from them; a dataset makes a generator of its own."""
        # One draw first: an earlier test may have left the very state that reading leads to.
        before = _generator_states(draw=True)
        read_rows(dataset, rows)
        for name, state in _generator_states().items():
            if state != before.get(name, state):
                fault(
                    f"reading rows draws from or seeds the global generator of {name}; "
                    "make one of its own: random.Random(…), torch.Generator()"
                )

    def test_an_index_out_of_range_is_refused(self, dataset: Dataset, sizes: dict[Split, int]) -> None:
        """A negative index would silently be a row counted from the end."""
        for split, size in sizes.items():
            for index in (-1, -size - 1, size, size + 1000):
                _expect_refusal(dataset, (split, index), size)

    def test_a_resumed_run_reads_on_where_it_stopped(self, make: Callable[..., Any], order: list[Place]) -> None:
        """It makes the dataset anew and begins in the middle."""
        whole = read_rows(make(), order)
        middle = len(order) // 2
        compare(whole, read_rows(make(), order[middle:]), f"if a run resumes at position {middle}")

    def test_its_pace_is_one_that_a_run_can_keep(
        self, dataset: Dataset, make: Callable[..., Any], sizes: dict[Split, int], rows: Rows
    ) -> None:
        """The plan asks once for the windows of a stage, and the run draws from them to the end."""
        if not isinstance(dataset, Paced):
            pytest.skip("all its rows are available at any time")
        for num_prompts in (1, 10, _MANY_PROMPTS):
            windows = dataset.windows(num_prompts)
            if problem := window_problem(windows, sizes["train"]):
                fault(f"windows({num_prompts}): {problem}")
            read_rows(dataset, rows)
            other: Any = make()
            for when, again in (("after rows were read", dataset), ("of another instance", other)):
                if again.windows(num_prompts) != windows:
                    fault(f"windows({num_prompts}) are others {when}; {PURE}")

    def test_readers_share_the_rows_between_them(self, make: Callable[..., Any], order: list[Place]) -> None:
        """Each replica reads its part of the positions: together every row of them, none twice."""
        one, several = make(), [make() for _ in range(_NUM_READERS)]
        alone = Counter(content_of(read_row(one, place)) for place in order)
        shared = Counter(
            content_of(read_row(several[index % _NUM_READERS], place)) for index, place in enumerate(order)
        )
        for row in alone | shared:
            if alone[row] != shared[row]:
                fault(
                    f"a row is read {alone[row]} times by one reader, and {shared[row]} times if {_NUM_READERS} "
                    f"readers share the rows: {row:.200}; {PURE}"
                )
