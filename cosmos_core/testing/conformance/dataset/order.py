"""The same row at the same number: whenever, in whatever order and by whomever it is read."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest

from cosmos_core.config.order import window_problem
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Dataset, DatasetContext, Paced, Split
from cosmos_core.testing.conformance.dataset.process import as_sent, read_elsewhere
from cosmos_core.testing.conformance.dataset.reading import (
    PURE,
    Place,
    Rows,
    compare,
    content_of,
    places_by_position,
    read_row,
    read_rows,
)
from cosmos_core.testing.conformance.dataset.subject import DatasetSubject
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON

_NUM_THREADS = 4
_NUM_READERS = 3
_MANY_PROMPTS = 100_000


class DatasetOrder(DatasetSubject):
    """When and where a row is read."""

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
        """Whether a dataset draws from the seed or not, one of another seed beside it changes nothing."""
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
