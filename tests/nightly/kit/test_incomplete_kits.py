"""A kit that a project's tests leave out, skip or change is never taken for one that ran."""

import os
from importlib.util import find_spec

import pytest

from cosmos_service_check.recorder import run_pytest

REWARD = """
from cosmos_core.protocols import Provider, hookimpl

class Brevity:
    def __init__(self, options, context): ...

    def score(self, completion):
        return 1 / (len(completion.text) + 1)

@hookimpl
def cosmos_reward():
    return Provider(create=Brevity)
"""
INCOMPLETE = {
    "marked": ("pytestmark = pytest.mark.skip(reason='later')", "skipped by the project's tests: later"),
    "expected-to-fail": (
        "pytestmark = pytest.mark.xfail(reason='known', run=False)",
        "[NOTRUN] known",
    ),
    "skipped-by-a-fixture": (
        "@pytest.fixture\ndef options(self):\n    pytest.skip('no network')",
        "skipped by the project's tests: no network",
    ),
    "overridden": (
        "def test_it_is_found_and_made_of_options_that_teach(self): ...",
        "Test4 overrides it, so that the kit's own did not run",
    ),
    "hidden": (
        "test_it_is_found_and_made_of_options_that_teach = None",
        "left out by the project's tests; inherit the whole class",
    ),
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    bodies = {"good": "", **{name: body for name, (body, _) in INCOMPLETE.items()}}
    return run_kit("reward", dict.fromkeys(bodies, REWARD), bodies=bodies)


def left(outcomes):
    return {each.test: each.message for each in outcomes if each.result == "not run"}


def test_nothing_is_left_of_a_kit_that_ran(outcomes):
    assert {each.result for each in outcomes["good"]} == {"passed", "skipped"}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_what_is_left_of_a_kit_is_named(outcomes, name):
    test = "test_it_is_found_and_made_of_options_that_teach"
    assert INCOMPLETE[name][1] in left(outcomes[name])[test]


@pytest.mark.parametrize("name", ["marked", "expected-to-fail"])
def test_all_is_left_of_a_kit_of_which_nothing_ran(outcomes, name):
    assert {*left(outcomes[name])} == {each.test for each in outcomes["good"]}


CLASS = "class TestMine(RewardConformance):\n    plugin = 'mine'\n"
KIT = f"from cosmos_core.testing import RewardConformance\n\n{CLASS}"
WORKERS = "-n 2" if find_spec("xdist") else ""
OPTIONS = f"[pytest]\naddopts = {WORKERS} -k nothing -m nothing --ff --maxfail=1 --deselect tests\n"
COMPLETE = {
    "of addopts": {"pytest.ini": OPTIONS, "tests/test_mine.py": KIT},
    "where the project looks for them": {
        "pytest.ini": "[pytest]\ntestpaths = proofs\npython_files = prove_*.py\n",
        "proofs/prove_mine.py": KIT,
        "tests/test_broken.py": "1 / 0",
    },
    "with modules beside them": {
        "tests/shared.py": "from cosmos_core.testing import RewardConformance\n",
        "tests/test_mine.py": f"from shared import RewardConformance\n\n{CLASS}",
    },
    "with names used twice": {
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
        "tests/one/test_mine.py": KIT,
        "tests/two/test_mine.py": KIT,
    },
    "with another copy of the plugin on the path": {
        "pytest.ini": "[pytest]\npythonpath = .\nfilterwarnings = error\n",
        "acme_mine.py": "raise SystemExit",
        "tests/__init__.py": "",
        "tests/test_mine.py": KIT,
    },
}


@pytest.fixture
def run(tmp_path):
    """Run the kit in a project of these files, as the check does."""

    def outcomes(files):
        site, project = tmp_path / "site", tmp_path / "project"
        entry = "[cosmos_core.rewards]\nmine = acme_mine\n"
        metadata = "Metadata-Version: 2.1\nName: acme-mine\nVersion: 1.0\n"
        info = {"METADATA": metadata, "entry_points.txt": entry}
        installed = {"acme_mine.py": REWARD, **{f"acme_mine-1.0.dist-info/{name}": text for name, text in info.items()}}
        for folder, contents in ((site, installed), (project, files)):
            for name, text in contents.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path}
        what = {"modules": ["acme_mine"], "plugins": [("reward", "mine")]}
        return run_pytest(project, timeout_s=60, environment=environment, **what)

    return outcomes


@pytest.mark.parametrize("how", COMPLETE)
def test_kits_run_whatever_the_configuration(run, how):
    assert {each.result for each in run(COMPLETE[how])} == {"passed", "skipped"}


def test_the_environments_options_are_no_matter(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    assert {each.result for each in run({"tests/test_mine.py": KIT})} == {"passed", "skipped"}
    # Nothing is left behind in the project.
    assert {path.name for path in (tmp_path / "project").iterdir()} == {"tests"}


def test_what_a_conftest_leaves_out_is_left(run):
    conftest = (
        "def pytest_collection_modifyitems(items):\n    items[:] = [each for each in items if 'score' in each.name]\n"
    )
    outcomes = run({"tests/conftest.py": conftest, "tests/test_mine.py": KIT})
    assert "left out by the project's tests" in left(outcomes)["test_it_is_found_and_made_of_options_that_teach"]


def test_a_part_of_the_kit_is_not_the_kit(run):
    part = KIT.replace("cosmos_core.testing import", "cosmos_core.testing.conformance.plugin import")
    part = part.replace("RewardConformance", "PluginConformance").replace("plugin = ", "kind, plugin = 'reward', ")
    part = f"import pytest\n{part}    context = pytest.fixture(lambda self: None)\n"
    outcomes = run({"tests/test_mine.py": part})
    assert "passed" in {each.result for each in outcomes}
    assert all("left out by the project's tests" in message for message in left(outcomes).values())
    assert {*left(outcomes)}.isdisjoint({each.test for each in outcomes if each.result == "passed"})
