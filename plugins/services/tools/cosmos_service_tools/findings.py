"""What an examination of a machine finds: a line each. A check that fails is a line, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import ConfigError


@attrs.frozen(kw_only=True)
class Finding:
    """One line.

    Attributes:
        check: What was looked at.
        status: `ok`, `warning` (a run may do without) or `problem` (a run would fail).
        text: What was found.
        remedy: What to do; empty where nothing is wrong.
    """

    check: str
    status: Literal["ok", "warning", "problem"]
    text: str
    remedy: str = ""


Check: TypeAlias = Callable[[], Iterator[Finding]]


def ok(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check=check, status="ok", text=text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """A run may do without."""
    return Finding(check=check, status="warning", text=text, remedy=remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    """A run would fail."""
    return Finding(check=check, status="problem", text=text, remedy=remedy)


def examine(recipe_path: Path | None) -> list[Finding]:
    """Make every check, those of a recipe as well where there is one."""
    from cosmos_service_tools import needs, software, system  # noqa: PLC0415 - they are made of findings

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


_COLUMN: Final = 12


def words(found: Sequence[Finding]) -> str:
    """The lines, with a last one that counts."""
    lines = [
        f"{each.status:<8} {each.check:<{_COLUMN}} {'; '.join(filter(None, (each.text, each.remedy)))}"
        for each in found
    ]
    counts = {status: sum(each.status == status for each in found) for status in ("problem", "warning")}
    told = [f"{number} {status}{'s' if number > 1 else ''}" for status, number in counts.items() if number]
    return "\n".join([*lines, "", " and ".join(told) if told else "Nothing is wrong."])


def plain(found: Sequence[Finding]) -> str:
    """The lines as JSON."""
    listed: list[dict[str, Any]] = [attrs.asdict(each) for each in found]
    return json.dumps(listed, indent=2, ensure_ascii=False)
