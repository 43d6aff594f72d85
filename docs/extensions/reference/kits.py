"""The directive `conformance-kit KIND`: what a kit's class takes, and each of its tests with the reason for it.

`conformance-kit all` lists the tests that the kits of all kinds share, `conformance-kit denoising` those that an engine
of latents has beside those of any engine, and `conformance-kit family` those of a family of world models.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from sphinx.application import Sphinx

from cosmos_core import testing
from cosmos_core.testing.conformance.plugin import PluginConformance
from reference.markdown import directive, table


def setup(app: Sphinx) -> Mapping[str, bool]:
    """Register the directive."""
    app.add_directive("conformance-kit", directive(reference, takes_argument=True))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def reference(kind: str) -> str:
    """A kit as Markdown."""
    if kind == "all":
        return _tests(PluginConformance, ())
    if kind == "denoising":
        return _tests(testing.DenoisingEngineConformance, dict(tests(testing.EngineConformance)))
    if kind == "family":
        return _tests(testing.DenoisingModelConformance, dict(tests(testing.ModelConformance)))
    kit: type[PluginConformance] = getattr(testing, f"{kind.capitalize()}Conformance")
    head = f"`cosmos_core.testing.{kit.__name__}`\n\n```text\n{inspect.getdoc(kit)}\n```"
    return f"{head}\n\n{_tests(kit, dict(tests(PluginConformance)))}"


def tests(kit: type) -> Iterator[tuple[str, str]]:
    """(name, reason) of each test of a class, those of its bases included, in the order of the source."""
    seen: set[str] = set()
    for cls in kit.__mro__:
        for name, member in vars(cls).items():
            if name.startswith("test_") and name not in seen:
                seen.add(name)
                yield name, inspect.getdoc(member) or ""


def _tests(kit: type, left_out: Mapping[str, str] | tuple[()]) -> str:
    rows = [
        (name.removeprefix("test_").replace("_", " "), reason) for name, reason in tests(kit) if name not in left_out
    ]
    return table(("requirement", "because"), rows)
