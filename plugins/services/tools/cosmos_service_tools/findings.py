"""Findings of an examination of a machine, a line each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs


@attrs.frozen(kw_only=True)
class Finding:
    """One line.

    Attributes:
        check: What was looked at.
        status: `ok`, `warning` (a run may do without) or `problem` (a run would fail).
        text: What was found.
        remedy: What to do; empty where nothing is wrong.
    """

    check: str
    status: Literal["ok", "warning", "problem"]
    text: str
    remedy: str = ""


Check: TypeAlias = Callable[[], Iterator[Finding]]


def ok(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check=check, status="ok", text=text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """A run may do without."""
    return Finding(check=check, status="warning", text=text, remedy=remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    """A run would fail."""
    return Finding(check=check, status="problem", text=text, remedy=remedy)


_COLUMN: Final = 12


def words(found: Sequence[Finding]) -> str:
    """The lines, with a last one that counts."""
    lines = [
        f"{each.status:<8} {each.check:<{_COLUMN}} {'; '.join(filter(None, (each.text, each.remedy)))}"
        for each in found
    ]
    counts = {status: sum(each.status == status for each in found) for status in ("problem", "warning")}
    told = [f"{number} {status}{'s' if number > 1 else ''}" for status, number in counts.items() if number]
    return "\n".join([*lines, "", " and ".join(told) if told else "Nothing is wrong."])


def plain(found: Sequence[Finding]) -> str:
    """The lines as JSON."""
    listed: list[dict[str, Any]] = [attrs.asdict(each) for each in found]
    return json.dumps(listed, indent=2, ensure_ascii=False)
