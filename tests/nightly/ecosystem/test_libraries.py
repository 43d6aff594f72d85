"""Plugins whose library is an extra, for the environment of the tests lacks it: their tests, beside that library."""

import os
import site
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLUGINS = {"datasets/reasoning-gym": "library", "environments/verifiers": "library"}
"""Folders below `plugins`, and the extra that brings the library."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_plugin_passes_its_tests_beside_its_library(tmp_path, subtests):
    for folder, extra in PLUGINS.items():
        with subtests.test(folder=folder):
            project = tomllib.loads((ROOT / "plugins" / folder / "pyproject.toml").read_text())["project"]
            python = beside_this(tmp_path / folder, project["optional-dependencies"][extra])
            output = run(python, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", f"plugins/{folder}/tests")
            assert " passed" in output
            assert f"needs {project['name']}" not in output  # the reason of tests that skip


def beside_this(folder, requirements):
    """The Python of an environment that has the packages of this one, and others that win over them."""
    run(sys.executable, "-m", "venv", folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    these = [each for each in sys.path if each.endswith("site-packages")] or site.getsitepackages()
    lines = [f"import site; site.addsitedir({each!r})\n" for each in these]
    (packages / "outer.pth").write_text("".join(lines))
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements)
    return folder / "bin" / "python"


def run(*command):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
