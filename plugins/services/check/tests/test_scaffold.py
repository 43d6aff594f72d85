"""Packages from the templates: every name, every file, and what is refused; tests/nightly/ecosystem runs their kits."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import pytest
import yaml
from packaging.requirements import Requirement

from cosmos_core import __version__
from cosmos_core.config.loading import load_recipe
from cosmos_core.config.problems import show
from cosmos_core.errors import ConfigError, CosmosError, PluginConflictError
from cosmos_core.plugins.known import KNOWN
from cosmos_core.protocols import KINDS
from cosmos_core.protocols.provider import entry_point_group
from cosmos_service_check import scaffold
from cosmos_service_check.scaffold import KIND_OF, Names, new_package

ROOT = Path(__file__).resolve().parents[4]
LONG = "a" + "-b2" * 13
"""A name of 40 characters."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One package of each kind, and of an agent; these are environments, too."""
    return {what: new_package(what, "sample", into=tmp_path_factory.mktemp(what)) for what in KIND_OF}


def metadata(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())


def loaded(folder, code):
    """What a process prints that has the package on its path."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


FUNCTION = """
def brevity(prompt, completion, reference, *, longest: int = 40):
    return max(0.0, 1 - len(completion) / longest)
"""


def test_a_package_of_a_function(tmp_path):
    (tmp_path / "my_rewards.py").write_text(FUNCTION)
    folder = new_package("reward", "brevity", into=tmp_path, function=f"{tmp_path}/my_rewards.py:brevity")
    assert (folder / "cosmos_reward_brevity" / "functions.py").read_text() == FUNCTION
    code = "from cosmos_reward_brevity.plugin import cosmos_reward as hook; print(hook().options(longest=3).longest)"
    assert loaded(folder, code) == "3\n"
    assert [reward.plugin for reward in load_recipe(folder / "example.toml").reward] == ["brevity"]
    for wrong, said in [("my_rewards.py", "expected PATH.py:NAME"), ("my_rewards.py:long", "nothing of that name")]:
        with pytest.raises(CosmosError, match=said):
            new_package("reward", "other", into=tmp_path, function=f"{tmp_path}/{wrong}")


AGENT = """
async def asker(session, task, *, hint: str = "Again."): ...

class Echo:
    def reset(self, prompt, seed): ...
    def step(self, text): ...
    def close(self): ...
"""


def test_a_function_of_a_session_and_a_task_becomes_an_agent(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(AGENT)
    folder = new_package("agent", "asker", into=tmp_path, function=f"{file}:asker")
    code = "from cosmos_environment_asker.plugin import cosmos_environment as hook; print(hook().options().hint)"
    assert loaded(folder, code) == "Again.\n"
    assert "class TestAskerAgent(AgentConformance)" in (folder / "tests" / "test_conformance.py").read_text()
    recipe = load_recipe(folder / "example.toml")
    assert (recipe.environment.plugin, "chat_template" in recipe.model.options) == ("asker", True)
    for what, name, said in [("environment", "asker", "an agent, which calls"), ("agent", "Echo", "an environment")]:
        with pytest.raises(ConfigError, match=said):
            new_package(what, "other", into=tmp_path, function=f"{file}:{name}")


# -- names ------------------------------------------------------------------------------------------------------------


def test_the_names_of_a_package():
    names = Names.of("engine", "slow-one")
    assert names.distribution == "cosmos-engine-slow-one"
    assert names.package == "cosmos_engine_slow_one"
    assert names.group == "cosmos_core.engines"
    assert (names.plugin_class, names.options_class) == ("SlowOneEngine", "SlowOneOptions")

    assert Names.of("reward", "my-reward").plugin_class == "MyReward"
    assert Names.of("reward", "reward").plugin_class == "RewardReward"


def test_a_name_that_cannot_be_is_refused():
    for name, nearest in [
        ("My_Reward", "my-reward"),
        ("myReward", "my-reward"),
        ("short answers", "short-answers"),
        ("2nd--try-", "nd-try"),
        ("Kürze", "kurze"),
        ("../evil", "evil"),
        ("a.b", "a-b"),
        ("cosmos_reward_x", "x"),
        ("", "my-reward"),
        ("π", "my-reward"),
    ]:
        with pytest.raises(ConfigError) as caught:
            Names.of("reward", name)
        assert str(caught.value).endswith(f"such as {nearest}")
        Names.of("reward", nearest)
    for kind, name, message in [
        ("rewards", "x", r"'rewards' is no kind of plugin; did you mean reward\? \(kinds: model, algorithm, reward"),
        ("metric", "x", r"'metric' is no kind of plugin \(kinds: model"),
        ("reward", "cosmos-reward-x", "leave cosmos-reward- out of 'cosmos-reward-x'"),
        ("reward", LONG + "c", "has 41 characters; take one of at most 40"),
        ("model", "hugging-face", "would have a class HuggingFaceModel, as the core has"),
        ("engine", "rollout-engine", "would have a class RolloutEngine, as the core has"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Names.of(kind, name)


def test_a_name_that_is_installed_is_refused(tmp_path, make_distribution):
    make_distribution("acme", entries="[cosmos_core.rewards]\nshort = acme_a\n", modules={"acme_a.py": ""})
    with pytest.raises(PluginConflictError, match=r"the reward 'short' is provided by acme 1\.0; choose another name"):
        new_package("reward", "short", into=tmp_path)
    new_package("dataset", "short", into=tmp_path)


def test_a_known_name_is_refused_though_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(scaffold, "discover", lambda _: [])
    for kind, name in KNOWN:
        with pytest.raises(PluginConflictError, match=f"provided by {KNOWN[kind, name]}; choose another"):
            new_package(kind, name, into=tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- files ------------------------------------------------------------------------------------------------------------


def test_the_files_of_a_package(made):
    for what, kind in KIND_OF.items():
        folder = made[what]
        assert folder.name == f"cosmos-{kind}-sample"
        package = f"cosmos_{kind}_sample"
        expected = {
            ".github/workflows/publish.yml",
            ".github/workflows/test.yml",
            ".gitignore",
            "CHANGELOG.md",
            "LICENSE",
            "README.md",
            "example.toml",
            "pyproject.toml",
            "tests/test_conformance.py",
            f"{package}/__init__.py",
            f"{package}/plugin.py",
            f"{package}/py.typed",
        }
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        assert expected <= set(files)
        # The kind's own test, besides the kit.
        assert len([name for name in files if name.startswith("tests/")]) >= 2
        for name, path in files.items():
            text = path.read_text()
            text = re.sub("chat_template = .*", "", text.replace("${{", ""))
            assert "{%" not in text, name
            assert "{{" not in text, name
            assert not text.endswith("\n\n"), name
            if path.suffix == ".py":
                assert ast.get_docstring(ast.parse(text)), name
    assert (made["reward"] / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_metadata(made):
    for what, kind in KIND_OF.items():
        project = metadata(made[what])["project"]
        assert project["entry-points"] == {entry_point_group(kind): {"sample": f"cosmos_{kind}_sample.plugin"}}
        (core,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "cosmos-core"]
        assert core.specifier.contains(__version__, prereleases=True)
        assert {clause.operator for clause in core.specifier} == {">=", "<"}
        assert project["license"] == "Apache-2.0"
        assert "authors" not in project
        assert project["description"] == f"The {what} sample for cosmos-core."


def test_author_and_description_are_written_as_they_are_or_refused(tmp_path):
    author, description = 'Ann "A." Lœ\\', "Rewards 'short' answers: 100 %."
    folder = new_package("reward", "sample", into=tmp_path, author=author, description=description)
    project = metadata(folder)["project"]
    assert project["authors"] == [{"name": author}]
    assert project["description"] == description
    assert description in (folder / "README.md").read_text()
    for option in ["author", "description"]:
        with pytest.raises(ConfigError, match=f"--{option} 'a\\\\nb': write it as one line"):
            new_package("reward", "sample", into=tmp_path, **{option: "a\nb"})
    with pytest.raises(ConfigError, match="--description has 513 characters, and PyPI takes at most 512; shorten it"):
        new_package("reward", "long", into=tmp_path, description="x" * 513)
    folder = new_package("reward", "long", into=tmp_path, description="x" * 512)
    assert metadata(folder)["project"]["description"] == "x" * 512


def workflow(folder, name):
    return yaml.safe_load((folder / ".github/workflows" / name).read_text())


def test_its_workflows_publish_what_passes_without_a_token(made):
    publishing = workflow(made["reward"], "publish.yml")
    publish = publishing["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == {"name": "pypi", "url": "https://pypi.org/p/cosmos-reward-sample"}
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert publishing["permissions"] == {"contents": "read"}
    assert "secrets." not in json.dumps(publishing)

    testing, publishing = (workflow(made["reward"], name) for name in ("test.yml", "publish.yml"))
    jobs = publishing["jobs"]
    assert jobs["test"] == {"uses": "./.github/workflows/test.yml"}
    assert jobs["publish"]["needs"] == ["test", "build"]
    # YAML 1.1 reads `on` as a boolean.
    assert "workflow_call" in testing[True]
    tested = [step.get("run") for step in testing["jobs"]["test"]["steps"]]
    build = tested.index("python -m build")
    assert tested[build + 1 :] == ["twine check --strict dist/*", "cosmos check dist/*.whl"]
    assert "twine check --strict dist/*" in [step.get("run") for step in jobs["build"]["steps"]]


def test_actions_are_pinned_and_keep_no_credentials(made):
    for name in ["test.yml", "publish.yml"]:
        steps = [step for job in workflow(made["reward"], name)["jobs"].values() for step in job.get("steps", ())]
        used = [step for step in steps if "uses" in step]
        assert all("@" in step["uses"] for step in used)
        checkouts = [step for step in used if step["uses"].startswith("actions/checkout@")]
        assert checkouts
        assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_the_example_is_a_recipe_that_names_the_plugin_and_only_what_the_group_installs(made):
    for what, kind in KIND_OF.items():
        recipe = load_recipe(made[what] / "example.toml", overrides=[], selections={})
        named = {
            "model": {recipe.model.plugin},
            "algorithm": {recipe.algorithm.plugin, recipe.warmup.plugin},
            "reward": {reward.plugin for reward in recipe.reward},
            "dataset": {recipe.dataset.plugin},
            "engine": {recipe.rollout.engine.plugin},
            "environment": {recipe.environment.plugin} if recipe.environment is not None else set(),
            "launcher": {recipe.launch.launcher},
            "hook": set(recipe.tracking.hooks),
        }
        assert "sample" in named[kind]
        assert recipe.run.steps <= 10
        needed = {KNOWN[each, name] for each in KINDS for name in named[each] - {"sample", "hf", "embedded", "local"}}
        groups = metadata(made[what])["dependency-groups"]
        assert {Requirement(line).name for line in groups["example"]} == needed
        assert {"include-group": "example"} in groups["dev"]


def test_the_readme_has_every_option_with_its_default(made, monkeypatch):
    for what, kind in KIND_OF.items():
        monkeypatch.syspath_prepend(made[what])
        for known in ("", ".plugin"):  # an agent's package has the name of an environment's
            monkeypatch.delitem(sys.modules, f"cosmos_{kind}_sample{known}", raising=False)
        module = pytest.importorskip(f"cosmos_{kind}_sample.plugin")
        rows = [
            [cell.strip().strip("`") for cell in line.strip("|").split("|")]
            for line in (made[what] / "README.md").read_text().splitlines()
            if line.startswith("| `")
        ]
        told = {name: (default, meaning) for name, _, default, meaning in rows}
        fields = {field.name: field for field in attrs.fields(module.SampleOptions)}
        assert told.keys() == fields.keys()
        for name, (default, meaning) in told.items():
            value = fields[name].default
            plain = isinstance(value, bool | int | float | str)
            assert default == ((value if isinstance(value, str) else show(value)) if plain else "none"), name
            assert fields[name].metadata["help"][1:10] == meaning[1:10], name


def test_importing_the_plugin_imports_no_torch(made):
    for kind in sorted(set(KINDS) - {"model"}):
        code = f"import sys, cosmos_{kind}_sample.plugin; print('torch' in sys.modules)"
        assert loaded(made[kind], code) == "False\n"


def test_ruff_has_nothing_to_say(tmp_path):
    for name in ["a", LONG]:
        for what in KIND_OF:
            (tmp_path / what).mkdir(exist_ok=True)
            new_package(what, name, into=tmp_path / what)
        for command in (["check"], ["format", "--diff"]):
            ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
            done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mypy_has_nothing_to_say(made):
    """All but the agent in one go, with the settings of a package that needs the most of them."""
    settings = made["model"] / "pyproject.toml"
    # What torch and the core are like is found once, and kept from run to run.
    kept = f"--cache-dir={ROOT / '.mypy_cache' / 'templates'}"
    for each in (KINDS, ["agent"]):
        environment = {**os.environ, "MYPYPATH": os.pathsep.join(str(made[what]) for what in each)}
        packages = [f"--package=cosmos_{KIND_OF[what]}_sample" for what in each]
        mypy = [sys.executable, "-m", "mypy", f"--config-file={settings}", kept, *packages]
        done = subprocess.run(mypy, cwd=settings.parent, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# -- writing ----------------------------------------------------------------------------------------------------------


def test_where_it_cannot_be_written_is_told(tmp_path, monkeypatch):
    target = tmp_path / "cosmos-reward-sample"
    target.mkdir()
    with pytest.raises(ConfigError, match="exists and is left as it is; remove it, or choose another name or --into"):
        new_package("reward", "sample", into=tmp_path)
    target.rmdir()
    target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exists"):
        new_package("reward", "sample", into=tmp_path)
    target.unlink()

    (tmp_path / "file").write_text("")
    for into in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError, match=f"--into {into}: there is no such folder"):
            new_package("reward", "sample", into=into)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(scaffold.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(ConfigError, match="cosmos-reward-sample cannot be written: Permission denied; name another"):
        new_package("reward", "sample", into=tmp_path)


def test_whoever_interrupts_it_finds_nothing_half_made(tmp_path, monkeypatch):
    write = Path.write_text
    for error in [KeyboardInterrupt, OSError]:
        written = []

        def interrupt(path, *args, written=written, error=error, **keywords):
            written.append(path)
            if len(written) == 5:
                raise error
            return write(path, *args, **keywords)

        monkeypatch.setattr(Path, "write_text", interrupt)
        with pytest.raises((KeyboardInterrupt, ConfigError)):
            new_package("reward", "sample", into=tmp_path)
        assert len(written) == 5
        assert list(tmp_path.iterdir()) == []


def test_the_folder_may_be_read_like_any_other(tmp_path):
    (tmp_path / "plain").mkdir()
    folder = new_package("reward", "sample", into=tmp_path)
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode
