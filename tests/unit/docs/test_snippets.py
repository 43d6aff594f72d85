"""Every python block of the documentation that follows a `% tested` line runs, block after block of one page."""

import re
from pathlib import Path

import torch

from cosmos_core import protocols
from cosmos_core.config.structure import check_class
from cosmos_core.protocols import KINDS, Provider, hooks

torch.set_num_threads(1)

DOCS = Path(__file__).parents[3] / "docs"
TESTED = re.compile(r"^% tested\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(page for page in DOCS.rglob("*.md") if "% tested" in page.read_text())
PROTOCOLS = {
    "model": protocols.Model,
    "algorithm": protocols.Algorithm,
    "reward": protocols.Reward,
    "dataset": protocols.Dataset,
    "environment": protocols.Environment,
    "launcher": protocols.Launcher,
}


def run(page):
    text = page.read_text()
    namespace = {"__name__": f"docs_{page.stem}"}
    for match in TESTED.finditer(text):
        line = text[: match.start(1)].count("\n")
        exec(compile("\n" * line + match[1], str(page), "exec"), namespace)
    return namespace


def test_each_kind_has_a_page_with_tested_snippets():
    assert {page.stem for page in PAGES} >= set(KINDS)
    marks = sum(page.read_text().count("% tested") for page in PAGES)
    assert marks == sum(len(TESTED.findall(page.read_text())) for page in PAGES)


def test_snippets_run_and_provide_what_their_page_is_about():
    for page in PAGES:
        namespace = run(page)
        if page.stem not in {*PROTOCOLS, "hook"}:
            continue
        provider = namespace[f"cosmos_{page.stem}"]()
        assert isinstance(provider, Provider), page
        check_class(provider.options)
        protocol = PROTOCOLS.get(page.stem)
        needed = [name for name in vars(protocol) if not name.startswith("_")] if protocol else []
        assert [name for name in needed if not hasattr(provider.create, name)] == [], page


def test_the_hooks_page_hooks_exist():
    names = re.findall(r"def (cosmos_\w+)\(self", (DOCS / "plugins" / "hook.md").read_text())
    assert names
    assert all(hasattr(hooks, name) for name in names)
