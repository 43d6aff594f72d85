"""Stage A: the tests of tests/gpu, a figure for each test function, however many cases it has."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, Final

import pytest

from tests.gpu.qualify.checks import ROOT
from tests.gpu.qualify.report import Figure, Verdict
from tests.gpu.qualify.where import Where

TESTS: Final = ROOT / "tests" / "gpu"


class Outcomes:
    """Counts the cases of each test function; a plugin of pytest."""

    def __init__(self, where: Where, file: str) -> None:
        self.where = where
        self.file = file
        self.name = ""
        self.counts = Counter[str]()
        self.said = ""

    def pytest_collectreport(self, report: Any) -> None:
        """Tell of what cannot be collected."""
        if report.failed:
            self.where.failed(self.file, str(report.longrepr).strip().splitlines()[-1])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take up what came of a case."""
        name = report.location[2].partition("[")[0]
        if name != self.name:
            self.finish()
            self.name = name
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.said = crash.message if crash else str(report.longrepr)
        elif report.skipped:
            self.said = self.said or report.longrepr[2].removeprefix("Skipped: ")

    def finish(self) -> None:
        """Tell of the function that has ended."""
        if not self.counts:
            return
        passed, failed = self.counts["passed"], self.counts["failed"]
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.counts.items()))
        verdict: Verdict = "failed" if failed else "passed" if passed else "skipped"
        name = self.name.removeprefix("test_").replace("_", " ")
        note = next(iter(self.said.splitlines()), "")
        self.where.tell(Figure(name=f"{self.file}: {name}", value=told, bound="none fails", verdict=verdict, note=note))
        self.counts.clear()
        self.said = ""


def run_file(where: Where, file: str) -> None:
    """Run the tests of a file."""
    os.environ["COSMOS_GPU_DEVICE"] = where.device
    outcomes = Outcomes(where, file)
    arguments = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(TESTS / file)]
    code = int(pytest.main(arguments, plugins=[outcomes]))
    outcomes.finish()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        where.failed(file, f"pytest ended with exit code {code}: see the log")
