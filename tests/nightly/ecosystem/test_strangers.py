"""What strangers do with the releases, in an environment of their own.

They install them, check one, run the demo; and they publish a plugin of each kind, and an agent: from
`cosmos plugins new` to a wheel, its installation, its kit, a run by name, and its removal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from zipfile import ZipFile

import attrs
import pytest
from packaging.utils import parse_wheel_filename

from cosmos_service_check.scaffold import KIND_OF, Names
from tests.nightly.ecosystem.environment import CleanEnvironment
from tests.nightly.ecosystem.wheels import ROOT, Wheelhouse

# The first test of the session waits for the wheels and for the environment to be made.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = ("warmup.steps=12", "run.steps=8", "evaluation.prompts=16", "evaluation.interval=4")
# Two words: the distribution's, the package's and the class's name all differ. An agent is an environment, too.
NAMES = {what: Names.of(what, "try-on" if what == "agent" else "try-out") for what in KIND_OF}


def test_what_is_installed_is_the_wheel(clean: CleanEnvironment) -> None:
    (site,) = (clean.folder / "venv" / "lib").glob("python*/site-packages")
    installed = {path.name for path in site.glob("cosmos_*") if not path.name.endswith(".dist-info")}
    assert installed >= {"cosmos_core", "cosmos_algorithm_grpo"}
    for wheel in clean.wheels.wheels:
        with ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.split("/")[0] in installed and not name.endswith("/"):
                    assert (site / name).read_bytes() == archive.read(name), name


def test_the_requirements_of_all_agree(clean: CleanEnvironment) -> None:
    assert "No broken requirements found" in clean.pip("check")


def test_every_plugin_is_found(clean: CleanEnvironment) -> None:
    listed = json.loads(clean.run("cosmos", "plugins", "list", "--json"))
    found = {(plugin["kind"], plugin["name"]) for plugin in listed if plugin["status"] == "ok"}
    assert {("model", "qwen"), ("algorithm", "grpo"), ("dataset", "arithmetic"), ("reward", "math")} <= found


def test_a_release_passes_the_check_installed_or_not(clean: CleanEnvironment, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "{number}?"}}\n' for number in range(20)))
    options = f'train = "{rows}", prompt = "{{text}}", demonstration = "{{text}}", reference = "text"'
    given = {"cosmos-reward-math": [], "cosmos-dataset-jsonl": ["--set", f"options={{{options}}}"]}
    for wheel in clean.wheels.wheels:
        distribution, *_ = parse_wheel_filename(wheel.name)
        if distribution in given:
            output = clean.run("cosmos", "check", wheel, *given.pop(distribution))
            assert output.rstrip().endswith("PASSED"), output
    assert not given


def test_the_demo_runs_away_from_the_checkout(clean: CleanEnvironment, tmp_path: Path) -> None:
    overrides = [argument for key in SHORT for argument in ("--set", key)]
    shutil.copy(ROOT / "recipes" / "arithmetic.toml", tmp_path)
    clean.run("cosmos", "run", "arithmetic.toml", *overrides, folder=tmp_path)
    run = tmp_path / "runs" / "arithmetic"
    assert json.loads((run / "summary.json").read_text())["outcome"] == "finished"
    assert str(ROOT) not in (run / "manifest.json").read_text()


@attrs.frozen(kw_only=True)
class Published:
    """Packages made from the templates, one of each, which are installed from their wheels until withdrawn."""

    projects: Mapping[str, Path]
    clean: CleanEnvironment
    before: set[str]

    def withdraw(self) -> None:
        self.clean.pip("uninstall", "--yes", *(NAMES[what].distribution for what in self.projects))


def in_environment(clean: CleanEnvironment) -> set[str]:
    (site,) = (clean.folder / "venv" / "lib").glob("python*/site-packages")
    return {path.name for place in (site, clean.bin) for path in place.iterdir()}


@pytest.fixture(scope="module")
def published(clean: CleanEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    folder = tmp_path_factory.mktemp("templates")
    for what, names in NAMES.items():
        clean.run("cosmos", "plugins", "new", what, names.name, "--into", folder)
    projects = {what: folder / names.distribution for what, names in NAMES.items()}
    files = [project / "pyproject.toml" for project in projects.values()]
    clean.pip("install", *(f"--group={file}:{group}" for file in files for group in ("test", "example")))
    before = in_environment(clean)
    house = Wheelhouse.build(folder / "dist", [*projects.values()])
    for what, project in projects.items():
        # From here on only the wheel can be tested.
        shutil.rmtree(project / NAMES[what].package)
    clean.pip("install", *house.wheels)
    found = Published(projects=projects, clean=clean, before=before)
    assert in_environment(clean) > before
    yield found
    found.withdraw()


@pytest.mark.parametrize("what", NAMES)
def test_a_package_from_the_template_is_used_from_its_wheel(what: str, published: Published) -> None:
    project, clean = published.projects[what], published.clean
    passes_its_own_tests(project, clean)
    passes_the_check_with_its_kit(project, NAMES[what], clean)
    runs_by_name(project, NAMES[what], clean)


def test_packages_that_were_removed_leave_nothing_and_are_unknown(published: Published) -> None:
    published.withdraw()
    assert in_environment(published.clean) == published.before
    listed = json.loads(published.clean.run("cosmos", "plugins", "list", "--json"))
    assert not {names.name for names in NAMES.values()} & {plugin["name"] for plugin in listed}
    what, project = next(iter(published.projects.items()))
    shutil.rmtree(project / "runs", ignore_errors=True)
    output = " ".join(published.clean.run("cosmos", "run", "example.toml", folder=project, code=2).split())
    assert f"no {what} plugin named '{NAMES[what].name}' is installed" in output
    # Whose that name may be by now is not for the core to guess.
    assert f"pip install {NAMES[what].distribution}" not in output


def passes_its_own_tests(project: Path, clean: CleanEnvironment) -> None:
    # The check runs the kit; one run of it is enough.
    arguments = ("-p", "no:cacheprovider", "--ignore=tests/test_conformance.py")
    assert " passed" in clean.run("pytest", *arguments, folder=project)


def passes_the_check_with_its_kit(project: Path, names: Names, clean: CleanEnvironment) -> None:
    verdict = clean.run("cosmos", "check", project, timeout_s=240).rstrip()
    assert verdict.endswith("PASSED"), verdict
    (kit,) = [line for line in verdict.splitlines() if f"{names.kind} {names.name}, kit: " in line]
    assert kit.startswith("- ok "), kit
    assert " passed" in kit


def runs_by_name(project: Path, names: Names, clean: CleanEnvironment) -> None:
    clean.run("cosmos", "run", "example.toml", folder=project, timeout_s=180)
    run = project / "runs" / names.name
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["steps"] > 0
    used = json.loads((run / "manifest.json").read_text())["plugins"]
    found = {(each["kind"], each["name"], each["distribution"]) for each in used}
    assert (names.kind, names.name, names.distribution) in found
