"""The way of a plugin from `cosmos plugins new` to strangers: wheel, installation, kit, run by name, removal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cosmos_core.protocols import KINDS, Kind
from tests.nightly.ecosystem.environment import CleanEnvironment
from tests.nightly.ecosystem.wheels import Wheelhouse

# The first test of the session waits for the wheels and for the environment to be made.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = "try-out"  # two words: the distribution's, the package's and the class's name all differ


@contextmanager
def installed(wheel: Path, distribution: str, clean: CleanEnvironment) -> Iterator[None]:
    clean.pip("install", wheel)
    try:
        yield
    finally:
        clean.pip("uninstall", "--yes", distribution)


def in_environment(clean: CleanEnvironment) -> set[str]:
    (site,) = (clean.folder / "venv" / "lib").glob("python*/site-packages")
    return {path.name for place in (site, clean.bin) for path in place.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_from_the_template_is_published_and_used(kind: Kind, clean: CleanEnvironment, tmp_path: Path) -> None:
    clean.run("cosmos", "plugins", "new", kind, NAME, "--into", tmp_path)
    distribution, package = f"cosmos-{kind}-{NAME}", f"cosmos_{kind}_{NAME}".replace("-", "_")
    project = tmp_path / distribution
    groups = [f"--group={project / 'pyproject.toml'}:{group}" for group in ("test", "example")]
    clean.pip("install", *groups)
    before = in_environment(clean)

    (wheel,) = Wheelhouse.build(tmp_path / "dist", [project]).wheels
    # From here on only the wheel can be tested.
    shutil.rmtree(project / package)

    with installed(wheel, distribution, clean):
        assert in_environment(clean) > before
        passes_its_own_tests(project, clean)
        passes_the_check_with_its_kit(project, kind, clean)
        runs_by_name(project, kind, distribution, clean)

    assert in_environment(clean) == before
    is_unknown(project, kind, distribution, clean)


def passes_its_own_tests(project: Path, clean: CleanEnvironment) -> None:
    # The check runs the kit; one run of it is enough.
    arguments = ("-p", "no:cacheprovider", "--ignore=tests/test_conformance.py")
    assert " passed" in clean.run("pytest", *arguments, folder=project)


def passes_the_check_with_its_kit(project: Path, kind: Kind, clean: CleanEnvironment) -> None:
    verdict = clean.run("cosmos", "plugins", "check", project, timeout_s=240).rstrip()
    assert verdict.endswith("PASSED"), verdict
    (kit,) = [line for line in verdict.splitlines() if f"{kind} {NAME}, kit: " in line]
    assert kit.startswith("- ok "), kit
    assert " passed" in kit


def runs_by_name(project: Path, kind: Kind, distribution: str, clean: CleanEnvironment) -> None:
    clean.run("cosmos", "run", "example.toml", folder=project, timeout_s=180)
    run = project / "runs" / NAME
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["steps"] > 0
    used = json.loads((run / "manifest.json").read_text())["plugins"]
    assert (kind, NAME, distribution) in {(each["kind"], each["name"], each["distribution"]) for each in used}


def is_unknown(project: Path, kind: Kind, distribution: str, clean: CleanEnvironment) -> None:
    shutil.rmtree(project / "runs")
    for command in ("plan", "run"):
        output = " ".join(clean.run("cosmos", command, "example.toml", folder=project, code=2).split())
        assert f"no {kind} plugin named '{NAME}' is installed" in output
        assert f"pip install {distribution}" in output
