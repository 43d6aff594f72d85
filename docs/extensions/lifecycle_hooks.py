"""The directive `lifecycle-hooks`: a table of the lifecycle hooks, from their specifications."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from cosmos_core.protocols import PROJECT, hooks


class LifecycleHooks(SphinxDirective):
    """A table of hooks, their arguments and when they are called."""

    def run(self) -> list[nodes.Node]:
        """Render the specifications as Markdown and parse it."""
        return self.parse_text_to_nodes(reference())


def setup(app: Sphinx) -> Mapping[str, bool]:
    """Register the directive."""
    app.add_directive("lifecycle-hooks", LifecycleHooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def reference() -> str:
    """The table as Markdown."""
    rows = [
        f"| `{name}({', '.join(inspect.signature(spec).parameters)})` | {inspect.getdoc(spec)} |"
        for name, spec in inspect.getmembers(hooks, inspect.isfunction)
        if hasattr(spec, f"{PROJECT}_spec") and not getattr(spec, f"{PROJECT}_spec")["firstresult"]
    ]
    return "\n".join(["| hook | when |", "|---|---|", *rows])
