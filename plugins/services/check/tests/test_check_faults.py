"""Faults that `cosmos check` must name, planted in wheels and in a project."""

import json
import os

import pytest

from cosmos_service_check.examination import Given, examine
from cosmos_service_check.subject import subject
from cosmos_service_check.verdict import text

from .wheels import METADATA, build, without

HEADER = """
import attrs
from cosmos_core.config import option
from cosmos_core.protocols import Provider, hookimpl
"""
GOOD = """
@attrs.frozen(kw_only=True)
class Options:
    length: int = option(3, help="How long.")

class Brevity:
    def __init__(self, options, context):
        self.length = options.length

    def score(self, completion):
        return min(1.0, self.length / (len(completion.text) + 1))

@hookimpl
def cosmos_reward():
    return Provider(create=Brevity, options=Options)
"""
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


def check(target):
    with subject(str(target), None) as found:
        return examine(found, Given(), lambda _: None)


def found(verdict):
    return {check.name: [finding.text for finding in check.findings] for check in verdict.checks}


MODULES = {
    "slow": "import time\ntime.sleep(1.05)\n" + HEADER + GOOD,
    "heavy": "import matplotlib\n" + HEADER + GOOD,
    "noisy": "print('hello')\n" + HEADER + GOOD,
    "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    + HEADER
    + GOOD,
    "raising": "1 / 0\n",
    "misspelt-hook": HEADER + GOOD + "\n@hookimpl\ndef cosmos_step_finnished(run, step, metrics): ...\n",
    "no-attrs": HEADER + GOOD.replace("options=Options", "options=dict"),
    "newer": HEADER + GOOD.replace("options=Options", "options=Options, protocol=2"),
    "undocumented": HEADER
    + GOOD.replace("option(3, help='How long.')", "3").replace('option(3, help="How long.")', "3"),
    "not-a-number": HEADER + GOOD.replace("return min", "return float('nan') or min"),
    "needs-option": HEADER + GOOD.replace('option(3, help="How long.")', 'option(help="How long.")'),
}
ENTRY_POINTS = "\n".join(
    [
        "[cosmos_core.rewards]",
        *(f"{name} = cosmos_reward_faulty.{name.replace('-', '_')}" for name in MODULES),
        "twice = cosmos_reward_faulty.slow",
        "[cosmos_core.datasets]",
        "twice = cosmos_reward_faulty.slow",
        "[cosmos_core.reward]",
        "misplaced = cosmos_reward_faulty.slow",
    ]
)

PLANTED = {
    "no licence": ("metadata", "it has no licence"),
    "no Python": ("metadata", "it does not say which Pythons it is for"),
    "an unbounded requirement": ("requirements", "it requires cosmos-core>=0.1, without an upper bound; write"),
    "two kinds of one name": ("entry points", "the name 'twice' to a reward and to a dataset plugin; rename one"),
    "a misspelt group": ("entry points", "group 'cosmos_core.reward' is unknown to the core; write [project.entry-"),
    "a file in another's package": ("files", "cosmos_core/extra.py lies in cosmos_core, which belongs to cosmos-core"),
    "a file beside all packages": ("files", "tests/test_x.py would lie beside the packages of all other projects"),
    "a file that takes the place of Python's": ("files", "queue.py lies in queue, which belongs to Python"),
    "no py.typed": ("files", "cosmos_reward_faulty/py.typed is missing"),
    "a slow import": ("reward slow, import", "s to import, allowed is 1 s; import what is slow in"),
    "a heavy import": ("reward heavy, import", "cosmos_reward_faulty.heavy imports matplotlib"),
    "an import that prints": ("reward noisy, import", "prints 'hello'"),
    "an import that starts a thread": ("reward threads, import", "starts threads (Thread-1 (sleep))"),
    "an import that raises": ("reward raising, import", "cannot be imported: ZeroDivisionError: division by zero"),
    "a misspelt hook": ("reward misspelt-hook, protocol", "did you mean cosmos_step_finished?"),
    "options that are no attrs class": ("reward no-attrs, protocol", "<class 'dict'> is no attrs class; write a class"),
    "a newer protocol": ("reward newer, protocol", "it needs a newer cosmos-core: pip install -U cosmos-core"),
    "an undocumented option": ("reward undocumented, kit", "options without a help text: length"),
    "a reward that is no number": ("reward not-a-number, kit", "nan"),
    "an option that must be given": ("reward needs-option, kit", "--set options.length=…"),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    files = {
        "cosmos_reward_faulty/__init__.py": "",
        **{f"cosmos_reward_faulty/{name.replace('-', '_')}.py": source for name, source in MODULES.items()},
        "cosmos_core/extra.py": "",
        "tests/test_x.py": "",
        "queue.py": "raise SystemExit",
    }
    metadata = without("License", "Requires-Python").replace(">=0.1,<0.2", ">=0.1")
    return check(build(tmp_path_factory.mktemp("faulty"), "cosmos-reward-faulty", files, ENTRY_POINTS, metadata))


@pytest.mark.parametrize("fault", PLANTED)
def test_the_fault_is_named(faulty, fault):
    name, message = PLANTED[fault]
    assert any(message in each for each in found(faulty)[name]), found(faulty)[name]


def test_each_fault_is_told_once(faulty):
    texts = [finding.text for check in faulty.checks for finding in check.findings if finding.level == "fault"]
    assert sorted(texts) == sorted(set(texts))
    assert text(faulty).endswith(f"\nFAILED: {len(texts)} faults")


@pytest.mark.parametrize(
    "name",
    [
        "reward twice, import, protocol, kit",
        "reward misplaced, import, protocol, kit",
        "reward raising, protocol, kit",
        "reward misspelt-hook, kit",
    ],
)
def test_what_cannot_be_used_is_checked_no_further(faulty, name):
    (message,) = found(faulty)[name]
    assert message.endswith("see above")


def test_an_incompatible_requirement_is_named(tmp_path):
    files = {"cosmos_reward_far/__init__.py": HEADER + GOOD, "cosmos_reward_far/py.typed": ""}
    entry = "[cosmos_core.rewards]\nfar = cosmos_reward_far\n"
    metadata = METADATA.replace(">=0.1,<0.2", ">=99,<100")
    verdict = check(build(tmp_path, "cosmos-reward-far", files, entry, metadata))
    (message,) = found(verdict)["requirements"]
    assert message.startswith("it requires cosmos-core")
    assert message.endswith("pip install -U cosmos-core")
    assert verdict.num_faults == 1


def test_a_missing_requirement_is_to_be_installed(tmp_path):
    files = {"cosmos_reward_lone/__init__.py": HEADER + GOOD, "cosmos_reward_lone/py.typed": ""}
    entry = "[cosmos_core.rewards]\nlone = cosmos_reward_lone\n"
    metadata = METADATA.replace("\n\n", "\nRequires-Dist: notthere>=1\n\n")
    verdict = check(build(tmp_path, "cosmos-reward-lone", files, entry, metadata))
    assert found(verdict)["requirements"] == ["notthere is not installed; pip install 'notthere>=1'"]
    assert text(verdict).endswith("\nINCOMPLETE: 2 checks not run")


AGENT = """
from cosmos_core.protocols import EnvironmentCapabilities, Provider, hookimpl

class Asker:
    def __init__(self, options, context): ...

    async def run(self, session, task):
        await session.client.chat.completions.create(model=session.model, messages=[{"role": "user", "content": "?"}])

@hookimpl
def cosmos_environment():
    return Provider(create=Asker, capabilities=EnvironmentCapabilities(calls_model=True))
"""


@pytest.mark.parametrize(("kind", "source"), [("reward", HEADER + GOOD), ("environment", AGENT)])
def test_a_good_wheel_passes_without_being_installed(kind, source, tmp_path):
    name = f"cosmos_{kind}_good"
    files = {f"{name}/__init__.py": source, f"{name}/py.typed": ""}
    entry_points = f"[cosmos_core.{kind}s]\ngood = {name}\n"
    verdict = check(build(tmp_path, name.replace("_", "-"), files, entry_points))
    assert not any(found(verdict).values()), text(verdict)
    assert text(verdict).endswith("\nPASSED")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project that is installed as `pip install -e` does it, for this process and those that it starts."""
    folder, site = tmp_path / "project", tmp_path / "site"
    package, info = folder / "cosmos_reward_mine", site / "cosmos_reward_mine-1.0.dist-info"
    for each in (package, folder / "tests", info):
        each.mkdir(parents=True)
    (package / "__init__.py").write_text(HEADER + GOOD)
    (package / "py.typed").touch()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "cosmos-reward-mine"\nversion = "1.0"\n'
        '[project.entry-points."cosmos_core.rewards"]\nmine = "cosmos_reward_mine"\n'
    )
    (folder / "tests" / "test_other.py").write_text("def test_other(): raise AssertionError\n")
    (info / "METADATA").write_text(METADATA.format(name="cosmos-reward-mine"))
    (info / "entry_points.txt").write_text("[cosmos_core.rewards]\nmine = cosmos_reward_mine\n")
    (info / "direct_url.json").write_text(json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}}))
    for each in (site, folder):
        monkeypatch.syspath_prepend(str(each))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(site), os.environ.get("PYTHONPATH", "")]))
    return folder


def test_a_missing_conformance_class_is_named_with_the_lines_to_add(project):
    verdict = check(project)
    (message,) = found(verdict)["reward mine, kit"]
    assert "no test inherits RewardConformance for mine; add tests/test_conformance.py:" in message
    lines = message.partition("\n")[2]
    (project / "tests" / "test_conformance.py").write_text(lines)
    assert text(check("mine")).endswith("\nPASSED")


def test_a_kit_that_was_skipped_has_not_passed(project):
    (project / "tests" / "test_conformance.py").write_text(
        "import pytest\nfrom cosmos_core.testing import RewardConformance\n\n\n@pytest.mark.skip(reason='later')\n"
        "class TestMine(RewardConformance):\n    plugin = 'mine'\n"
    )
    verdict = check(project)
    (message,) = found(verdict)["reward mine, kit"]
    assert message.endswith("more: skipped by the project's tests: later")
    assert text(verdict).endswith("\nINCOMPLETE: 1 check not run")


def test_a_module_that_cannot_be_collected_is_named(project):
    (project / "tests" / "test_conformance.py").write_text("from cosmos_core.testing import RewardConformanz\n")
    (message,) = found(check(project))["reward mine, kit"]
    assert "RewardConformanz" in message


def test_an_installation_that_is_behind_its_project_is_named(project):
    file = project / "pyproject.toml"
    file.write_text(file.read_text() + 'more = "cosmos_reward_mine"\n')
    (message, *_) = found(check(project))["entry points"]
    assert "cosmos_core.rewards: more = cosmos_reward_mine" in message
    assert "pip install -e" in message


def test_a_wheel_is_checked_whatever_is_installed(project, tmp_path):
    source = "print('from the wheel')\n" + HEADER + GOOD
    files = {"cosmos_reward_mine/__init__.py": source, "cosmos_reward_mine/py.typed": ""}
    wheel = build(tmp_path, "cosmos-reward-mine", files, "[cosmos_core.rewards]\nmine = cosmos_reward_mine\n")
    (message,) = found(check(wheel))["reward mine, import"]
    assert "prints 'from the wheel'" in message


def test_a_wheel_in_its_projects_dist_folder_is_checked_by_the_projects_tests(project):
    (project / "dist").mkdir()
    files = {"cosmos_reward_mine/__init__.py": HEADER + GOOD, "cosmos_reward_mine/py.typed": ""}
    entry = "[cosmos_core.rewards]\nmine = cosmos_reward_mine\n"
    verdict = check(build(project / "dist", "cosmos-reward-mine", files, entry))
    (message,) = found(verdict)["reward mine, kit"]
    assert "no test inherits RewardConformance for mine" in message
