"""The walks of docs/architecture.md name functions that are there, twelve steps each."""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
LINK = re.compile(r"((?:`[A-Za-z_.]+`(?:, )?)*)(?:,? ?in )?\[[^\]]+\]\((\.\./cosmos_core/[^)]+)\)")


def names_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef))
        elif isinstance(node, ast.FunctionDef):
            yield node.name


def test_each_step_names_what_is_there():
    found = list(LINK.finditer((DOCS / "architecture.md").read_text()))
    assert len(found) >= 39
    for link in found:
        path = (DOCS / link[2]).resolve()
        assert path.exists(), f"{link[2]} is gone"
        missing = set(re.findall(r"`([^`]+)`", link[1])) - set(names_of(path))
        assert not missing, f"{link[2]} has no {missing}"


def test_each_walk_has_twelve_steps():
    walks = (DOCS / "architecture.md").read_text().split("\n## ")[2:]
    assert [len(re.findall(r"^\| \d+ \|", walk, re.MULTILINE)) for walk in walks] == [12, 12, 12]
