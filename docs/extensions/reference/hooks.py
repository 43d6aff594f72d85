"""The directives `lifecycle-hooks`, a table of all of them, and `lifecycle-hook NAME`, one with its exact signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sphinx.application import Sphinx

from cosmos_core.protocols import KINDS, hooks
from cosmos_core.protocols.hooks import PROJECT
from reference.markdown import code, directive, table
from reference.signatures import declaration


def setup(app: Sphinx) -> Mapping[str, bool]:
    """Register the directives."""
    app.add_directive("lifecycle-hooks", directive(lambda _: reference(), takes_argument=False))
    app.add_directive("lifecycle-hook", directive(one, takes_argument=True))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def lifecycle_hooks() -> Mapping[str, Callable[..., Any]]:
    """Every lifecycle hook's specification, in the order of the protocol's source."""
    providers = {f"cosmos_{kind}" for kind in KINDS}
    return {
        name: spec for name, spec in vars(hooks).items() if hasattr(spec, f"{PROJECT}_spec") and name not in providers
    }


def reference() -> str:
    """A table of the hooks, each linked to its page."""
    rows = [
        (
            f"[`{name}`](/plugins/hooks/{name}.md)",
            f"`{', '.join(inspect.signature(spec).parameters)}`",
            spec.__doc__ or "",
        )
        for name, spec in lifecycle_hooks().items()
    ]
    return table(("hook", "arguments", "when"), rows)


def one(name: str) -> str:
    """One hook: its signature, and when it is called."""
    spec = lifecycle_hooks()[name]
    return f"{code(declaration(spec))}\n\n{inspect.getdoc(spec)}"
