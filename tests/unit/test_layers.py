"""What must not be imported: torch by the command line and the controller, anything by the bare package."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "module",
    [
        "cosmos_core",
        "cosmos_core.cli.main",
        "cosmos_core.cli.plugins",
        "cosmos_core.config.loading",
        "cosmos_core.control.server",
        "cosmos_core.plugins.selection",
        "cosmos_core.protocols",
        "cosmos_core.replica.client",
        "cosmos_core.transport.payloads",
    ],
)
def test_no_torch(module: str) -> None:
    heavy = "{'torch', 'transformers', 'mlflow', 'matplotlib'}"
    check = f"loaded = {heavy} & set(sys.modules); sys.exit(f'imports {{loaded}}' if loaded else 0)"
    code = f"import sys, {module}; {check}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_plugin_is_under_the_import_contracts() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    plugins = {folder.name: folder.parts[-3] for folder in ROOT.glob("plugins/*/*/cosmos_*")}
    assert set(settings["root_packages"]) == {"cosmos_core", *plugins}
    for name, kinds in plugins.items():
        (contract,) = [each for each in settings["contracts"] if each["name"].startswith(f"Plugins in {kinds}:")]
        assert name in contract["source_modules"], name
    (alone,) = [each for each in settings["contracts"] if each["type"] == "independence"]
    assert set(alone["modules"]) == set(plugins)


def test_unit_tests_lie_where_the_packages_that_they_test_do():
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path("docs")}
    assert {folder for folder in folders if not (tests.parents[1] / "cosmos_core" / folder).is_dir()} == set()
