"""Examines a machine: every check is made, whatever others find. A check that fails is a line, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import ConfigError
from cosmos_service_tools import needs, software, system
from cosmos_service_tools.findings import Check, Finding, problem, warning


def examine(recipe_path: Path | None) -> list[Finding]:
    """Make every check, those of a recipe as well where there is one."""
    with software.torch_asked() as torch_facts:
        checks: dict[str, Check] = {
            "python": software.python,
            "cosmos-core": software.core,
            "plugins": software.plugins,
        }
        last: dict[str, Check] = {"torch": lambda: software.torch(torch_facts), "libraries": software.libraries}
        recipe, unloaded = None, []
        if recipe_path is not None:
            try:
                recipe = load_recipe(recipe_path)
            except ConfigError as error:
                unloaded = [problem("recipe", str(error), "mend the recipe; what it needs was not looked at")]
        output = Path("runs" if recipe is None else recipe.run.output_dir)
        checks |= system.checks(output)
        if recipe is not None and recipe_path is not None:
            checks |= needs.checks(recipe, recipe_path.parent)
        return [*_made(checks), *unloaded, *_made(last)]


def _made(checks: Mapping[str, Check]) -> Iterator[Finding]:
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - what is being examined may be broken in any way
            text = f"could not be looked at: {type(error).__name__}: {error}"
            yield warning(name, text, "look at it yourself")
