"""Findings of a check, as a text to paste into an issue or a release page, and as plain data.

The text is plain and also Markdown: a list with one item a check, what was found under it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, Final, Literal, TypeAlias, cast

import attrs

from cosmos_core.config.structure import unstructure

Level: TypeAlias = Literal["fault", "not run", "warning", "note"]

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
    """One check: its name, what was measured in a few words (may be empty), and what was found."""

    name: str
    summary: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def status(self) -> str:
        """`FAULT`, `not run`, `warning` or `ok`: the worst of its findings."""
        levels = {finding.level for finding in self.findings}
        return next((text for level, text in _STATUS.items() if level in levels), "ok")


def check(name: str, summary: str = "", **found: Iterable[str]) -> Check:
    """A check with each text that is not empty, once, as a finding of the level `fault`, `not_run`, and so on."""
    levels = {keyword: cast("Level", keyword.replace("_", " ")) for keyword in found}
    pairs = dict.fromkeys((levels[keyword], text) for keyword, texts in found.items() for text in texts if text)
    return Check(name, summary, tuple(Finding(*pair) for pair in pairs))


@attrs.frozen(kw_only=True)
class Verdict:
    """The end of a check.

    Attributes:
        distribution: The name and version that were checked.
        plugins: Its plugins that were checked, as `kind name`.
        date: The day, ISO 8601.
        environment: Versions of `core`, `python` and `torch`, and the `platform`.
        checks: The checks, in the order in which they were made.
    """

    distribution: str
    plugins: tuple[str, ...]
    date: str
    environment: Mapping[str, str]
    checks: tuple[Check, ...]

    @property
    def num_faults(self) -> int:
        """Number of faults that were found."""
        return sum(finding.level == "fault" for check in self.checks for finding in check.findings)

    @property
    def last_line(self) -> str:
        """The outcome, and the number of faults, or else of checks that could not be made in full."""
        num_not_run = sum(check.status == "not run" for check in self.checks)
        if num_faults := self.num_faults:
            return f"FAILED: {num_faults} fault{'s' if num_faults > 1 else ''}"
        return f"INCOMPLETE: {num_not_run} check{'s' if num_not_run > 1 else ''} not run" if num_not_run else "PASSED"

    @property
    def outcome(self) -> str:
        """`PASSED`, `FAILED`, or `INCOMPLETE` if no fault was found, but something could not be judged."""
        return self.last_line.partition(":")[0]


def this_environment() -> dict[str, str]:
    """The environment of this process; torch is looked up, not imported."""
    versions = {"core": version("cosmos-core"), "python": platform.python_version(), "torch": version("torch")}
    return {**versions, "platform": f"{platform.system()} {platform.machine()}"}


def text(verdict: Verdict) -> str:
    """The verdict for people; the last line is the outcome."""
    versions = "cosmos-core {core}, Python {python}, torch {torch}, {platform}".format(**verdict.environment)
    title = f"{verdict.distribution}: {', '.join(verdict.plugins)}"
    lines = [title, "", f"Checked {verdict.date} with {versions}.", ""]
    for check in verdict.checks:
        lines.append(f"- {check.status:<7}  {check.name}{f': {check.summary}' if check.summary else ''}")
        for finding in check.findings:
            first, *rest = finding.text.strip().splitlines()
            if len(rest) > _LONGEST_LINES:
                rest[_LONGEST_LINES:] = [f"… and {len(rest) - _LONGEST_LINES} more lines"]
            lines += [f"  - {finding.level}: {first}", *(f"    {line}".rstrip() for line in rest)]
    return "\n".join([*lines, "", verdict.last_line])


def plain(verdict: Verdict) -> dict[str, Any]:
    """The verdict for programs."""
    checks = [{**unstructure(check), "status": check.status} for check in verdict.checks]
    return {**unstructure(verdict), "outcome": verdict.outcome, "faults": verdict.num_faults, "checks": checks}
