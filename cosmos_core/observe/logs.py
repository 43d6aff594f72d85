"""A process's log: JSON lines in the run's folder, warnings in plain words on stderr."""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys
from pathlib import Path


class JsonLines(logging.Formatter):
    """One JSON object a line: `time` (UTC, ISO 8601), `level`, `logger`, `message`, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Render the record as one line."""
        entry = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class RepeatedWarning:
    """A warning that is logged ever less often, the 1st, 2nd, 4th, 8th … time: who causes it must not fill the log.

    Attributes:
        count: Times that there was a reason for it.
    """

    def __init__(self, logger: str) -> None:
        self.count, self._logger = 0, logging.getLogger(logger)

    def __call__(self, message: str, *arguments: object) -> None:
        """Count, and log `message` with its `arguments` and the count if it is due."""
        self.count += 1
        if self.count.bit_count() == 1:
            self._logger.warning("%s (%d so far)", message % arguments, self.count)


class _Plain(logging.Formatter):
    """`name: WARNING: message`, the traceback left to the file."""

    def __init__(self, name: str) -> None:
        super().__init__("%(process_name)s: %(levelname)s: %(message)s", defaults={"process_name": name})

    def formatException(self, ei: object) -> str:  # noqa: ARG002, N802 - the base class's name and signature
        return ""

    def format(self, record: logging.LogRecord) -> str:
        # The record is shared between handlers: the other one may have cached its traceback on it.
        cached, record.exc_text = record.exc_text, None
        try:
            return super().format(record).rstrip("\n")
        finally:
            record.exc_text = cached


def setup(path: Path, name: str) -> None:
    """Send this process's log records (INFO and above) to `path`, and WARNING and above to stderr as well.

    Python's warnings are logged too. Called again, it replaces what it set up before.

    Args:
        path: The JSON lines file; its folder is made. Appended to, so a resumed run keeps its history.
        name: Name of the process (`controller`, `policy-0`), shown on stderr.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    lines.setFormatter(JsonLines())
    plain = logging.StreamHandler(sys.stderr)
    plain.setLevel(logging.WARNING)
    plain.setFormatter(_Plain(name))
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler.formatter, JsonLines | _Plain):
            root.removeHandler(handler)
            handler.close()
    root.setLevel(logging.INFO)
    root.addHandler(lines)
    root.addHandler(plain)
    logging.captureWarnings(capture=True)
