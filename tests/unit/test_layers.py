"""The command line and the controller import no torch, plugins nothing private of the core."""

import ast
import re
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
    plugins = {folder.name for folder in ROOT.glob("plugins/*/*/cosmos_*")}
    assert set(settings["root_packages"]) == {"cosmos_core", *plugins}
    (alone,) = [each for each in settings["contracts"] if each["type"] == "independence"]
    assert set(alone["modules"]) == plugins


def imports_of(code: str) -> list[str]:
    """Modules of the core that `code` imports, and names out of them, without `cosmos_core.`."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [f"{getattr(node, 'module', '')}.{each.name}".lstrip(".") for node in nodes for each in node.names]
    return [name.removeprefix("cosmos_core.") for name in names if name.partition(".")[0] == "cosmos_core"]


def test_plugins_import_the_contract_and_the_building_blocks_of_their_kind() -> None:
    page = (ROOT / "docs/plugins/index.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \|$", page.partition("| building blocks |")[2], re.MULTILINE)
    blocks = {f"{kind}s": re.findall(r"`([\w.]+)`", cell) for kinds, cell in rows for kind in kinds.split(", ")}
    paths = [path.relative_to(ROOT) for path in ROOT.glob("plugins/*/*/cosmos_*/**/*.py")]
    assert {path.parts[1] for path in paths} == blocks.keys()
    for path in paths:
        allowed = ("protocols", "types", "errors", "config", *blocks[path.parts[1]])
        for name in imports_of((ROOT / path).read_text()):
            assert any(f"{name}.".startswith(f"{block}.") for block in allowed), f"{path} imports {name}"


def test_unit_tests_lie_where_the_packages_that_they_test_do():
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path("docs")}
    assert {folder for folder in folders if not (tests.parents[1] / "cosmos_core" / folder).is_dir()} == set()
