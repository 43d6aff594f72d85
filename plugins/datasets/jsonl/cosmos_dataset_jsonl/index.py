"""The usable rows of some files, by number: a few bytes of memory for each."""

from __future__ import annotations

import array
import logging
from collections.abc import Sequence
from typing import Literal, NoReturn

from cosmos_core.errors import DataError
from cosmos_core.types import Prompt
from cosmos_dataset_jsonl.mapping import RowMapping
from cosmos_dataset_jsonl.raw import RawRow, RowFile
from cosmos_dataset_jsonl.rows import BadRowError

logger = logging.getLogger(__name__)


class RowIndex:
    """Every usable row of the files, checked once when the index is made.

    Args:
        files: Scanned in this order.
        mapping: Decides what is usable.
        on_bad_row: `refuse` raises at the first bad row, `skip` leaves it out and counts it.

    Raises:
        DataError: A file cannot be read, a row is bad (file, line, reason), or no row is left.
    """

    def __init__(self, files: Sequence[RowFile], mapping: RowMapping, on_bad_row: Literal["refuse", "skip"]) -> None:
        self._files = files
        self._mapping = mapping
        self._file_numbers = array.array("I")
        self._locators = array.array("Q")
        self.num_bad_rows = 0
        for number, file in enumerate(files):
            for raw in file.scan():
                problem = self._problem(raw, file)
                if not problem:
                    self._file_numbers.append(number)
                    self._locators.append(raw.locator)
                elif on_bad_row == "refuse":
                    _refuse(file, raw, problem)
                else:
                    self.num_bad_rows += 1
                    logger.warning("%s:%d: row skipped: %s", file.path, raw.line, problem)
        if not self._locators:
            names = ", ".join(str(file.path) for file in files)
            raise DataError(
                f"{names}: no usable rows ({self.num_bad_rows} bad ones skipped); give a file that has some"
            )

    def __len__(self) -> int:
        return len(self._locators)

    def prompt(self, number: int) -> Prompt:
        """Usable row `number`, from 0.

        Raises:
            DataError: The file changed since it was checked.
        """
        file = self._files[self._file_numbers[number]]
        try:
            return self._mapping.prompt(file.read(self._locators[number]), file.path.parent)
        except BadRowError as error:
            raise DataError(f"{file.path}: row {number}: {error}; the file changed since the run began") from error

    def _problem(self, raw: RawRow, file: RowFile) -> str:
        if raw.problem:
            return raw.problem
        try:
            self._mapping.prompt(raw.row, file.path.parent)
        except BadRowError as error:
            return str(error)
        return ""


def _refuse(file: RowFile, raw: RawRow, problem: str) -> NoReturn:
    raise DataError(f"{file.path}:{raw.line}: {problem} (mend the row, or set dataset.options.on_bad_row = 'skip')")
