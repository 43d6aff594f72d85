"""Recipes and reward functions of the guides are ones that a run takes, and pages of the documentation have titles."""

import collections
import re
import tomllib
from pathlib import Path

import attrs
import pytest
import tomli_w

from cosmos_core.config.loading import load_recipe
from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import structure
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.recipe import selections
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import KINDS

DOCS = Path(__file__).parents[3] / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
BLOCK = "^```{}\n(.*?)^```$"
REST = {
    "run": {"name": "guide", "steps": 1},
    "model": {"path": "Qwen/Qwen3-0.6B"},
    "algorithm": {"plugin": "grpo"},
    "dataset": {"plugin": "arithmetic"},
    "policy": {"optimizer": {"lr": 1e-6}},
}
PLUGINS = {"engine": "rollout.engine", "launcher": "launch"}


def blocks(page, language):
    return re.findall(BLOCK.format(language), page.read_text(), re.MULTILINE | re.DOTALL)


def merged(rest, block):
    both = {key: merged(rest[key], block[key]) for key in rest.keys() & block.keys() if isinstance(block[key], dict)}
    return {**rest, **block, **both}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_recipe_of_a_guide_is_one_that_its_plugins_take(page, tmp_path):
    for code in blocks(page, "python"):
        (tmp_path / re.match(r"# (\w+\.py)\n", code)[1]).write_text(code)
    recipes = blocks(page, "toml")
    assert recipes
    for text in recipes:
        (tmp_path / "recipe.toml").write_text(tomli_w.dumps(merged(REST, tomllib.loads(text))))
        recipe = load_recipe(tmp_path / "recipe.toml")
        plugins = PluginSet.load(selections(recipe))
        tables = [
            ("model", recipe.model),
            ("algorithm", recipe.algorithm),
            *(("dataset", recipe.dataset) for _ in range("[dataset" in text)),
            *(("reward", reward) for reward in recipe.reward),
            ("engine", recipe.rollout.engine),
        ]
        for kind, table in tables:
            structure(table.options, plugins.provider(kind, table.plugin).options, f"{kind}.options")
        structure(recipe.launch.options, plugins.provider("launcher", recipe.launch.launcher).options, "launch.options")


def known(cls, prefix=""):
    """The dotted keys of a table's class."""
    for field in attrs.fields(attrs.resolve_types(cls)):
        yield f"{prefix}{field.name}"
        for part in (field.type, *getattr(field.type, "__args__", ())):
            if attrs.has(part):
                yield from known(part, f"{prefix}{field.name}.")


def test_every_key_in_the_second_column_of_a_guides_tables_is_one():
    keys, plugins = set(known(Recipe)), PluginSet()
    for record in discover():
        if record.kind in KINDS and record.kind != "hook":
            plugins.include(record.kind, record.name)
            options = attrs.fields_dict(plugins.provider(record.kind, record.name).options)
            keys |= {f"{PLUGINS.get(record.kind, record.kind)}.options.{name}" for name in options}
    rows = [line for page in GUIDES for line in page.read_text().splitlines() if line.startswith("| ")]
    told = [key for row in rows for key in re.findall(r"`([a-z]+\.[a-z_.]+[a-z_])`", "|".join(row.split("|")[2:]))]
    files = {name for name in told if name.endswith((".md", ".jsonl", ".toml"))}
    assert len(told) > 150
    assert set(told) - files - keys - {"cosmos_core.train"} == set()


def test_no_two_pages_have_one_title():
    titles = collections.defaultdict(list)
    for page in [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]:
        if not {"_build", "jupyter_execute"} & set(page.relative_to(DOCS).parts):
            heading = r"^# (.+)$" if page.suffix == ".md" else r'"# (.+?)(?:\\n)?"'
            title = re.search(heading, page.read_text(), re.MULTILINE)[1]
            titles[title.strip().casefold()].append(page.relative_to(DOCS).as_posix())
    assert len(titles) > 100
    assert "runs from python" in titles
    assert [pages for pages in titles.values() if len(pages) > 1] == []
