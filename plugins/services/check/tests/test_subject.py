import pytest

from cosmos_core.errors import ConfigError
from cosmos_service_check.subject import subject


def test_a_folder_that_nobody_named_must_be_a_plugins_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for lines, message in [
        ("", r"is no plugin's project: its pyproject.toml has no entry points of plugins; go to one, or say what"),
        ('dynamic = ["entry-points"]\n', "acme-z is not installed here; install it first"),
        ("[project.entry-points.'cosmos_core.rewards']\nz = 'acme_z'\n", "acme-z is not installed here"),
    ]:
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "acme-z"\n{lines}')
        with pytest.raises(ConfigError, match=message), subject(None, None):
            pass
