"""What rows hold: the right types, what is declared and nothing else, and nothing that two rows share."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.errors import TransportError
from cosmos_core.protocols import Dataset, DatasetCapabilities, Omission, Omitting, Split
from cosmos_core.rollout.rewards.wire import TO_WORKER, Task
from cosmos_core.testing.conformance.dataset.reading import SPLITS, Place, Rows, content_of, read_rows, take_row
from cosmos_core.testing.conformance.dataset.subject import DatasetSubject, size_problem
from cosmos_core.testing.conformance.plain_json import json_problems
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Message, Prompt


class DatasetContents(DatasetSubject):
    """What a dataset has."""

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
        """What cannot be sent to a worker cannot be scored."""
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
        """What is noted on one row must not appear on another."""
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


def location_problem(location: str) -> str:
    """What is wrong with where an image or a video is; empty if nothing is that can be known here."""
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
    """What is wrong with the counts of rows that are left out."""
    if not isinstance(omissions, tuple) or not all(isinstance(each, Omission) for each in omissions):
        yield f"{omissions!r:.100}; return a tuple of cosmos_core.protocols.Omission"
        return
    for each in omissions:
        if not isinstance(each.num_rows, int) or each.num_rows < 1 or not each.reason:
            yield f"{each!r:.200}; give a reason, and how many rows there are of it: 1 or more"
    reasons = [each.reason for each in omissions]
    for reason in dict.fromkeys(reason for reason in reasons if reasons.count(reason) > 1):
        yield f"{reason!r} is counted twice; add the rows up"


def _type_problems(row: Any) -> Iterator[str]:
    """What of a row is not what `Prompt` says; nothing checks that when one is made."""
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
