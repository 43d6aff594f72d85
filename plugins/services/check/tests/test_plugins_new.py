"""`cosmos plugins new`, as a user calls it."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cosmos_core.cli.main import main
from cosmos_core.cli.plugins import app


def new(*arguments):
    result = CliRunner().invoke(app, ["new", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_makes_a_package_and_says_what_to_do_next(tmp_path, monkeypatch):
    told = new("reward", "brief", "--into", tmp_path, "--author", "Ann Lee", "--description", "Short answers.")
    folder = tmp_path / "cosmos-reward-brief"
    metadata = (folder / "pyproject.toml").read_text()
    assert 'authors = [{ name = "Ann Lee" }]' in metadata
    assert 'description = "Short answers."' in metadata
    commands = [line.partition("#")[0].strip() for line in told.splitlines() if line.startswith("  ")]
    assert told.startswith(f"Made {folder}/. Next:\n")
    assert commands == [
        f"cd {folder}",
        "pip install --editable . --group dev",
        "pytest",
        "cosmos run example.toml",
        "cosmos check .",
    ]

    # The folder is the current one unless said.
    monkeypatch.chdir(tmp_path)
    assert "  cd cosmos-hook-notes\n" in new("hook", "notes")
    assert (tmp_path / "cosmos-hook-notes" / "example.toml").is_file()


def test_bad_input_is_refused_without_a_traceback(tmp_path, monkeypatch, capsys):
    for arguments, message in [
        (("rewrd", "brief"), "cosmos: 'rewrd' is no kind of plugin; did you mean reward?"),
        (("reward", "Brief_One"), "cosmos: a plugin cannot be named 'Brief_One': "),
        (("engine", "embedded"), "cosmos: the engine 'embedded' is provided by cosmos-core "),
        (("reward", "brief", "--into", "nowhere"), "cosmos: --into nowhere: there is no such folder"),
        (("reward", "kept"), "cosmos: cosmos-reward-kept exists and is left as it is"),
    ]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "cosmos-reward-kept").mkdir(exist_ok=True)
        with pytest.raises(SystemExit) as caught:
            main(["plugins", "new", *arguments])
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith(message)
        assert [path.name for path in tmp_path.iterdir()] == ["cosmos-reward-kept"]


def test_a_name_in_a_misspelt_group_of_others_can_be_taken(tmp_path, make_distribution):
    make_distribution("acme-a", entries="[cosmos_core.reward]\nbrief = acme_a\n", modules={"acme_a.py": ""})
    assert "cosmos-reward-brief" in new("reward", "brief", "--into", tmp_path)


def test_it_imports_no_torch(tmp_path):
    code = (
        "import sys; from cosmos_core.cli.plugins import app; "
        f"app(['new', 'engine', 'brief', '--into', {str(tmp_path)!r}], standalone_mode=False); "
        "sys.exit(bool({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    assert (tmp_path / "cosmos-engine-brief").is_dir()
