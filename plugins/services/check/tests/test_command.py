"""`cosmos check`: targets, options and exit codes."""

import json
import zipfile

import pytest
import typer
from typer.testing import CliRunner

from cosmos_core.errors import ConfigError, PluginNotFoundError
from cosmos_service_check import examination
from cosmos_service_check.command import check
from cosmos_service_check.examination import Given
from cosmos_service_check.verdict import Check, Finding, Verdict, this_environment

PROJECT = '[project]\nname = "{name}"\nversion = "1.0"\n[project.entry-points."cosmos_core.rewards"]\n{entries}\n'


@pytest.fixture
def asked(monkeypatch):
    """What would be examined, and with what; nothing is."""
    seen = []

    def examine(subject, given, progress):
        progress("Looking")
        seen.append((subject, given))
        findings = (Finding("fault", "bad"),) if given.path == "bad" else ()
        return Verdict(
            distribution=subject.name,
            plugins=tuple(record.name for record in subject.records),
            date="2026-01-01",
            environment=this_environment(),
            checks=(Check("all", "", findings),),
        )

    monkeypatch.setattr(examination, "examine", examine)
    return seen


def run(*arguments, code=0):
    application = typer.Typer()
    application.command()(check)
    result = CliRunner().invoke(application, arguments, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def short(make_distribution):
    entries = "[cosmos_core.rewards]\nshort = acme_a\nbrief = acme_a\n"
    return make_distribution("acme-a", entries=entries, modules={"acme_a.py": ""})


@pytest.fixture
def project(tmp_path, short):
    folder = tmp_path / "project"
    folder.mkdir()
    text = PROJECT.format(name="acme-a", entries='short = "acme_a"\nbrief = "acme_a"')
    (folder / "pyproject.toml").write_text(text)
    return folder


def names(subject):
    return [record.name for record in subject.records]


def test_a_name_means_one_installed_plugin(asked, short):
    for name in ["short", "acme-a:short", "Acme_A:short"]:
        assert run(name).endswith("\nPASSED\n")
        ((subject, given),) = asked
        assert (subject.name, names(subject), subject.project, given) == ("acme-a", ["short"], None, Given())
        asked.clear()


def test_a_distribution_means_every_plugin_of_it(asked, short):
    run("Acme_A", "--kind", "reward")
    assert names(asked[0][0]) == ["brief", "short"]


def test_a_folder_means_every_plugin_of_its_distribution(asked, project, monkeypatch):
    monkeypatch.chdir(project.parent)
    for target in (str(project), "./project", "project"):
        run(target)
    monkeypatch.chdir(project)
    run()
    run(".", "--kind", "reward")
    assert {tuple(names(subject)) for subject, _ in asked} == {("brief", "short")}
    assert {subject.project for subject, _ in asked} == {project}
    assert {subject.faults for subject, _ in asked} == {()}


def test_the_name_of_a_plugin_comes_before_that_of_a_folder(asked, project, monkeypatch):
    project.rename(project.parent / "short")
    monkeypatch.chdir(project.parent)
    run("short")
    assert names(asked[0][0]) == ["short"]


def test_a_stale_installation_is_told_with_the_line_that_mends_it(asked, project, short):
    spaced = project.rename(project.parent / "my project")
    (spaced / "pyproject.toml").write_text((spaced / "pyproject.toml").read_text().replace('"1.0"', '"1.1"'))
    run(str(spaced))
    (fault,) = asked[-1][0].faults
    assert "has version 1.1, 1.0 is installed; install it again: pip install -e" in fault
    assert fault.endswith(f"pip install -e '{spaced}'")
    origin = {"url": (spaced.parent / "other").as_uri(), "dir_info": {"editable": True}}
    (short / "acme_a-1.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    run(str(spaced))
    assert f"what is installed comes from {spaced.parent / 'other'}; install it again" in asked[-1][0].faults[0]


def test_a_wheel_is_found_without_being_installed(asked, tmp_path):
    wheel = tmp_path / "acme_w-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("acme_w.py", "raise RuntimeError('imported')")
        archive.writestr("acme_w-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: acme-w\nVersion: 1.0\n")
        archive.writestr("acme_w-1.0.dist-info/entry_points.txt", "[cosmos_core.rewards]\nwheeled = acme_w\n")
    assert run(str(wheel)).startswith("acme-w: wheeled\n")
    ((subject, _),) = asked
    assert [record.status for record in subject.records] == ["ok"]
    assert not subject.folder.exists()


def test_what_is_given_with_set_reaches_the_kit(asked, short):
    run("short", "--set", "options.length=3", "--set", "config.model_type=qwen3", "--set", "path=here")
    assert asked[0][1] == Given(options={"length": 3}, config={"model_type": "qwen3"}, path="here")

    # A fault is exit code 1 and json has it.
    answer = json.loads(run("short", "--set", "path=bad", "--json", code=1))
    assert (answer["outcome"], answer["faults"], answer["plugins"]) == ("FAILED", 1, ["short"])
    assert answer["checks"] == [
        {"name": "all", "summary": "", "findings": [{"level": "fault", "text": "bad"}], "status": "FAULT"}
    ]


@pytest.mark.usefixtures("short", "folders")
def test_what_cannot_be_checked_is_refused(asked, make_distribution, tmp_path):
    for arguments, error, message in [
        (["shrot"], PluginNotFoundError, "no plugin named 'shrot' is installed; did you mean short"),
        (["acme-z:short"], PluginNotFoundError, "by acme-z; it is installed by acme-a"),
        (["./nowhere"], ConfigError, r"nowhere is no plugin's project, which has a pyproject\.toml; go to one"),
        (["gone.whl"], ConfigError, "gone.whl does not exist; build it with: python -m build"),
        (["bad.whl"], ConfigError, "bad.whl cannot be read as a wheel"),
        (
            ["empty.whl"],
            ConfigError,
            "empty.whl is no wheel: it must have one .dist-info folder, whose METADATA has a name, and has none",
        ),
        (["./a way"], ConfigError, r"acme-away is not installed here; install it first: pip install -e 'a way'"),
        (["./toml"], ConfigError, r"pyproject\.toml cannot be read"),
        (["./nameless"], ConfigError, r"has no \[project\] name"),
        (["./table"], ConfigError, r"table/pyproject\.toml: Expected `object`, got `int` - at `project`"),
        (["./name"], ConfigError, r"name/pyproject\.toml: Expected `str`, got `int` - at `project\.name`"),
        (["./groups"], ConfigError, r"Expected `object`, got `str` - at `project\.entry-points\[\.\.\.\]`"),
        (["./members"], ConfigError, r"Expected `str`, got `int` - at `project\.entry-points"),
        ([], ConfigError, r"pyproject\.toml; go to one, or say what to check: a plugin \(.*short"),
        (["short", "--kind", "model"], PluginNotFoundError, "a reward plugin has that name"),
        (["short", "--set", "optoins.x=1"], ConfigError, r"--set\.optoins: unknown option; did you mean options\?"),
    ]:
        with pytest.raises(error, match=message):
            run(*arguments)
        assert not asked

    # A distribution without plugins is refused.
    make_distribution("acme-n", entries="", modules={})
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "pyproject.toml").write_text('[project]\nname = "acme-n"\n')
    with pytest.raises(ConfigError, match="acme-n has no cosmos-core plugin; add an entry point such as"):
        run(str(tmp_path / "none"))


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A working directory with what cannot be checked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.whl").write_text("no zip")
    zipfile.ZipFile(tmp_path / "empty.whl", "w").close()
    for folder, text in {
        "a way": PROJECT.format(name="acme-away", entries=""),
        "toml": "[project\n",
        "nameless": "[project]\n",
        "table": "project = 1\n",
        "name": "[project]\nname = 1\n",
        "groups": '[project.entry-points]\n"cosmos_core.rewards" = "short"\n',
        "members": '[project.entry-points."cosmos_core.rewards"]\nshort = 1\n',
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pyproject.toml").write_text(text)
