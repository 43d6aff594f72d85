"""A plugin from the template is installed, checked with its kit, and named by a recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commandline import CommandLine

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def project(cosmos: CommandLine) -> Path:
    """A reward's project, made by `cosmos plugins new`."""
    cosmos("plugins", "new", "reward", "try-out", "--into", str(cosmos.folder))
    return cosmos.folder / "cosmos-reward-try-out"


@pytest.fixture(scope="module")
def installed(cosmos: CommandLine, project: Path) -> CommandLine:
    """`cosmos` where the project is installed."""
    site = cosmos.folder / "site-try-out"
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", site, project], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))
        yield cosmos


def test_it_is_listed(installed: CommandLine) -> None:
    (line,) = [line for line in installed("plugins", "list").splitlines() if "try-out" in line]
    assert line.split() == ["reward", "try-out", "cosmos-reward-try-out", "0.1.0", "ok"]


def test_it_passes_the_check_with_its_kit(installed: CommandLine, project: Path) -> None:
    verdict = installed("check", str(project)).rstrip()
    assert verdict.endswith("PASSED"), verdict
    (kit,) = [line for line in verdict.splitlines() if "reward try-out, kit: " in line]
    assert kit.startswith("- ok "), kit


def test_a_run_uses_it_by_name(installed: CommandLine, project: Path) -> None:
    installed("run", str(project / "example.toml"))
    run = installed.folder / "runs" / "try-out"
    assert json.loads((run / "summary.json").read_text())["outcome"] == "finished"
    used = json.loads((run / "manifest.json").read_text())["plugins"]
    assert ("reward", "try-out", "cosmos-reward-try-out") in {
        (each["kind"], each["name"], each["distribution"]) for each in used
    }
