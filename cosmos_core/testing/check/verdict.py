"""Findings of a check, as a text to paste into an issue or a release page, and as plain data.

The text is plain and also Markdown: a list with one item a check, what was found under it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Literal, TypeAlias

import attrs

from cosmos_core import __version__
from cosmos_core.config.structure import unstructure

Level: TypeAlias = Literal["fault", "not run", "warning", "note"]
Outcome: TypeAlias = Literal["PASSED", "FAILED", "INCOMPLETE"]

_STATUS: Final = {"fault": "FAULT", "not run": "not run", "warning": "warning"}
_LONGEST_LINES: Final = 12


@attrs.frozen
class Finding:
    """One thing that was found.

    Attributes:
        level: `fault`: it must be mended. `not run`: it could not be judged. `warning` and `note`: worth knowing.
        text: What is wrong, the value seen, what to do.
    """

    level: Level
    text: str


@attrs.frozen
class Check:
    """One check.

    Attributes:
        name: What was checked.
        summary: What was measured, in a few words; may be empty.
        findings: What was found.
    """

    name: str
    summary: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def status(self) -> str:
        """`FAULT`, `not run`, `warning` or `ok`: the worst of its findings."""
        levels = {finding.level for finding in self.findings}
        return next((text for level, text in _STATUS.items() if level in levels), "ok")

    @property
    def is_passed(self) -> bool:
        """True if it ran and found no fault."""
        return self.status in ("ok", "warning")


@attrs.frozen(kw_only=True)
class Environment:
    """The versions that a check was made with."""

    core: str
    python: str
    torch: str
    platform: str


@attrs.frozen(kw_only=True)
class Verdict:
    """The end of a check.

    Attributes:
        distribution: What was checked: name and version.
        plugins: Its plugins that were checked, as `kind name`.
        date: The day, ISO 8601.
        environment: What it was checked with.
        checks: The checks, in the order in which they were made.
    """

    distribution: str
    plugins: tuple[str, ...]
    date: str
    environment: Environment
    checks: tuple[Check, ...]

    @property
    def num_faults(self) -> int:
        """Number of faults that were found."""
        return sum(finding.level == "fault" for check in self.checks for finding in check.findings)

    @property
    def outcome(self) -> Outcome:
        """`INCOMPLETE` if no fault was found, but something could not be judged."""
        if self.num_faults:
            return "FAILED"
        return "PASSED" if all(check.is_passed for check in self.checks) else "INCOMPLETE"


def this_environment() -> Environment:
    """The environment of this process; torch is looked up, not imported."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return Environment(
        core=__version__,
        python=platform.python_version(),
        torch=torch,
        platform=f"{platform.system()} {platform.machine()}",
    )


def text(verdict: Verdict) -> str:
    """The verdict for people; the last line is the outcome."""
    using = verdict.environment
    versions = f"cosmos-core {using.core}, Python {using.python}, torch {using.torch}, {using.platform}"
    lines = [
        f"{verdict.distribution}: {', '.join(verdict.plugins)}",
        "",
        f"Checked {verdict.date} with {versions}.",
        "",
        *(line for check in verdict.checks for line in _lines(check)),
        "",
        _last(verdict),
    ]
    return "\n".join(lines)


def plain(verdict: Verdict) -> dict[str, Any]:
    """The verdict for programs."""
    data: dict[str, Any] = unstructure(verdict)
    checks = [
        {**entry, "status": check.status} for entry, check in zip(data.pop("checks"), verdict.checks, strict=True)
    ]
    return {**data, "outcome": verdict.outcome, "faults": verdict.num_faults, "checks": checks}


def faults(texts: Iterable[str]) -> tuple[Finding, ...]:
    """Each text that is not empty, as a fault."""
    return tuple(Finding("fault", each) for each in texts if each)


def _lines(check: Check) -> Iterator[str]:
    yield f"- {check.status:<7}  {check.name}{f': {check.summary}' if check.summary else ''}"
    for finding in check.findings:
        first, *rest = finding.text.strip().splitlines()
        yield f"  - {finding.level}: {first}"
        yield from (f"    {line}".rstrip() for line in rest[:_LONGEST_LINES])
        if len(rest) > _LONGEST_LINES:
            yield f"    … and {len(rest) - _LONGEST_LINES} more lines"


def _last(verdict: Verdict) -> str:
    if verdict.outcome == "FAILED":
        return f"FAILED: {verdict.num_faults} fault{'s' if verdict.num_faults > 1 else ''}"
    if verdict.outcome == "INCOMPLETE":
        left = sum(not check.is_passed for check in verdict.checks)
        return f"INCOMPLETE: {left} check{'s' if left > 1 else ''} not run"
    return "PASSED"
