"""A dataset that is a plain function: it returns or yields rows."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import attrs

from cosmos_core.data.dataset import RowsDataset
from cosmos_core.data.mapping import chat_of, plain
from cosmos_core.data.options import RowsOptions
from cosmos_core.data.rows import BadRowError, RawRow, locations
from cosmos_core.errors import DataError, told_as
from cosmos_core.protocols import DatasetContext, Split
from cosmos_core.types import Prompt

GIVEN: Final = ("split", "seed", "directory")
"""Names of parameters that the run gives such a function."""
_LOG: Final = logging.getLogger(__name__)
_MOST: Final = 1_000_000
_SILENT_S: Final = 3.0
"""After which people are told what is waited for."""
_COMPARED: Final = 64
"""Rows of a split that tell whether two processes got the same ones."""
_KEYS: Final = ("prompt", "completion", "rejected", "reference", "media")


class FunctionDataset(RowsDataset):
    """The rows that a function gives, all in memory: texts, `Prompt`s, or mappings.

    Of a mapping, `prompt` is a text or the turns of a chat, `completion` the demonstration, `rejected` a worse one,
    `reference` what rewards compare with, `media` a location or several; every other key is a column (metadata). A
    function that takes `split` gives the held-out rows, too.

    Args:
        function: Called once for each split, in every process: it has to give the same rows each time.
        given: The names among `GIVEN` that it takes.
        values: Its own options.
        options: Which rows are checked and held out.
        context: The run.

    Raises:
        DataError: The function failed, gave no rows, or a bad one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        given: Sequence[str],
        values: Mapping[str, Any],
        options: RowsOptions,
        context: DatasetContext,
    ) -> None:
        has_splits = "split" in given
        if has_splits and (options.heldout_rows is not None or options.heldout_fraction is not None):
            raise DataError(
                f"{context.key_path}: the function takes `split` and gives the held-out rows itself; leave out "
                "heldout_rows and heldout_fraction"
            )

        def rows(split: Split) -> FunctionRows:
            known = {"split": split, "seed": context.seed, "directory": context.directory}
            name = f"{function.__name__}({split!r})" if has_splits else function.__name__
            return FunctionRows(name, context.directory, function, {name: known[name] for name in given} | {**values})

        self.sources: Final = [rows(split) for split in get_args(Split)[: 1 + has_splits]]
        train, heldout = self.sources[:1], self.sources[1:] or None
        super().__init__(function.__name__, options, _Mapping(), train, heldout, key_path=context.key_path)


class FunctionRows:
    """The rows of one call, a source in memory (see `RowSource`)."""

    def __init__(self, name: str, folder: Path, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.name: Final = name
        self.folder: Final = folder
        code = inspect.unwrap(function).__code__
        self.label: Final = f"dataset function {name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        self._call: Final = functools.partial(function, **arguments)
        self._rows: Final = [*self._given(_MOST + 1)]
        if len(self._rows) > _MOST:
            raise DataError(
                f"{self.label} gives more than {_MOST:,} rows, or never ends; let it end, or write a class with `size` "
                "and `row`, which need not hold its rows in memory (docs/plugins/functions.md)"
            )

    def _given(self, most: int) -> Iterator[Any]:
        """The first rows that a call of the function gives; people are told of what takes long."""
        number, words = 0, ("reading rows of %s: %d so far, of %d at most", self.label)
        silence = threading.Timer(_SILENT_S, lambda: _LOG.warning(*words, number, _MOST))
        silence.start()
        try:
            with told_as(DataError, f"{self.label} failed"):
                rows = self._call()
                if not isinstance(rows, Iterable):
                    raise DataError(f"{self.label} returned {rows!r:.100}; it yields rows, or returns a list")
                for number, row in enumerate(itertools.islice(rows, most), 1):  # noqa: B007 - for `silence`
                    yield row
        finally:
            silence.cancel()

    def _text(self, row: Any) -> str:
        """A row as text, the same wherever files lie; that of one that cannot be used is empty."""
        with contextlib.suppress(BadRowError):
            prompt = _Mapping().prompt(row, self.folder)
            return repr(attrs.evolve(prompt, media=tuple(Path(each).name for each in prompt.media)))
        return ""

    def _first(self) -> list[str]:
        return [*map(self._text, self._rows[:_COMPARED])]

    def digest(self) -> str:
        """SHA-256 of the number of rows and of the first ones: the same in every process, if the function is sound."""
        said = repr([len(self._rows), *self._first()])
        return hashlib.sha256(said.encode(errors="backslashreplace")).hexdigest()

    def require_same(self) -> None:
        """Call the function again; raises DataError if the first rows are others: each process would get its own."""
        again = [(row, self._text(row)) for row in self._given(_COMPARED)]
        if any(self._text(row) != text for row, text in again):
            raise DataError(
                f"{self.label} changes rows after it has given them, as one does that yields the same dict again: let "
                "it make a new one for each row, as in `yield dict(row)`"
            )
        calls = itertools.zip_longest(self._first(), (text for _, text in again), fillvalue="no row")
        for number, texts in enumerate(calls, 1):
            if texts[0] != texts[1]:
                start = max(0, len(os.path.commonprefix(texts)) - 30)  # noqa: RUF071 - of characters
                before, after = (text[start : start + 60] for text in texts)
                raise DataError(
                    f"{self.label}: its row {number} was {before}, and is {after} when it is called again, as every "
                    "process of the run calls it: let it draw from random.Random(0), or random.Random(seed) with its "
                    "argument `seed`, and begin anew in each call"
                )

    def scan(self) -> Iterator[RawRow]:
        """Every row, in order."""
        return (RawRow(locator=number, line=number + 1, row=row) for number, row in enumerate(self._rows))

    def places(self) -> Iterator[int]:
        """The number of every row."""
        return iter(range(len(self._rows)))

    def read(self, locator: int) -> Any:
        """A row by its number."""
        return self._rows[locator]


class _Mapping:
    """Makes prompts of the rows (see `RowMapping`)."""

    def prompt(self, row: Any, folder: Path) -> Prompt:
        """Make the prompt of a row; raises BadRowError if it cannot be used."""
        if isinstance(row, Prompt):
            metadata = {str(name): plain(value, str(name)) for name, value in row.metadata.items()}
            return attrs.evolve(row, reference=plain(row.reference, "reference"), metadata=metadata)
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise BadRowError(f"a row is a text, a Prompt or a mapping with `prompt`, not a {type(row).__name__}")
        text, answer = row.get("prompt"), None
        if isinstance(text, str) and not text.strip():
            raise BadRowError("the prompt is empty")
        if not isinstance(text, str | list) and "prompt" in row:
            raise BadRowError(f"the prompt is {text!r:.100}, neither a text nor the turns of a chat")
        if not isinstance(text, str):
            text, answer = chat_of(row, "prompt")
        return Prompt(
            text=text,
            reference=plain(row.get("reference"), "reference"),
            demonstration=_optional(row, "completion") or answer,
            rejected=_optional(row, "rejected"),
            media=() if row.get("media") is None else locations(row, "media", folder),
            metadata={str(name): plain(value, str(name)) for name, value in row.items() if name not in _KEYS},
        )


def _optional(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise BadRowError(f"field {name!r} is {value!r:.100}, not text")
