"""What users install: complete, typed, licensed, each file in one distribution."""

from __future__ import annotations

import glob
import tarfile
import tomllib
from collections import Counter
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

from tests.nightly.ecosystem.wheels import ROOT, Wheelhouse, build, projects

# The first test of the session waits for the wheels to be made.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CORE, *PLUGINS = projects()


def name_of(project: Path) -> str:
    return tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"]


def package_of(project: Path) -> Path:
    (package,) = project.glob("cosmos_*/")
    return package


def files(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(params=projects(), ids=name_of)
def project(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def wheel(project: Path, wheels: Wheelhouse) -> Path:
    (path,) = [path for path in wheels.wheels if parse_wheel_filename(path.name)[0] == name_of(project)]
    return path


@pytest.fixture
def sdist(project: Path, wheels: Wheelhouse) -> Path:
    (path,) = [path for path in wheels.sdists if parse_sdist_filename(path.name)[0] == name_of(project)]
    return path


def test_a_wheel_has_every_file_of_its_package_and_no_other(project: Path, wheel: Path) -> None:
    package = package_of(project)
    # Unlike `Path.rglob`, it follows the link to the recipes.
    found = map(Path, glob.glob(f"{package}/**", recursive=True, include_hidden=True))  # noqa: PTH207
    written = {path for path in found if path.is_file() and "__pycache__" not in path.parts}
    packed = {name for name in files(wheel) if ".dist-info/" not in name}
    assert packed == {path.relative_to(project).as_posix() for path in written}
    assert f"{package.name}/py.typed" in packed


def test_a_wheel_says_what_it_is(project: Path, wheel: Path) -> None:
    found = metadata(wheel)
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("License-File") == ["LICENSE"]
    assert found["Requires-Python"] == ">=3.11"
    assert found["Summary"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in found.get_all("Classifier", [])


def test_the_licence_is_the_repositorys(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("project", PLUGINS, ids=name_of)
def test_a_plugin_wants_the_core_that_it_is_released_with(wheel: Path) -> None:
    needed = [
        requirement
        for requirement in map(Requirement, metadata(wheel).get_all("Requires-Dist", []))
        if canonicalize_name(requirement.name) == "cosmos-core"
    ]
    release = tomllib.loads((CORE / "pyproject.toml").read_text())["project"]["version"]
    assert [requirement.marker for requirement in needed].count(None) == 1
    for requirement in needed:
        assert release in requirement.specifier
        assert {clause.operator for clause in requirement.specifier} == {">=", "<"}


def test_an_sdist_has_the_tests_and_the_licence(project: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {Path(*Path(member.name).parts[1:]).as_posix() for member in archive if member.isfile()}
    tests = {path.relative_to(project).as_posix() for path in project.glob("tests/**/*.py")}
    assert tests <= packed
    assert {"LICENSE", "README.md", "pyproject.toml"} <= packed
    assert not [name for name in packed if "cache" in name.lower() and not name.endswith(".py")]


@pytest.mark.parametrize("project", [CORE, PLUGINS[0]], ids=name_of)
def test_an_sdist_is_enough_to_build_both_again(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    # Both from the folder, where `build` alone makes the wheel from the new sdist.
    build(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "dist", "--sdist", "--wheel")
    assert contents(tmp_path / "dist" / wheel.name) == contents(wheel)
    with tarfile.open(tmp_path / "dist" / sdist.name) as again, tarfile.open(sdist) as first:
        assert set(again.getnames()) == set(first.getnames())


def test_no_file_is_in_two_distributions(wheels: Wheelhouse) -> None:
    owners = Counter(name for wheel in wheels.wheels for name in files(wheel))
    assert [name for name, count in owners.items() if count > 1] == []
