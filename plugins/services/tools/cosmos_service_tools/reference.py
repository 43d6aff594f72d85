"""The keys of an options class, for people: each with its type, bounds, default and help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from cosmos_core.config.dynamic import demands
from cosmos_core.config.problems import show
from cosmos_core.config.structure import describe, fields, unstructure


@attrs.frozen(kw_only=True)
class Key:
    """One key of a table.

    Attributes:
        name: Its name; with the names of the tables above it, joined by dots.
        type: What a recipe may give, in words.
        bounds: What its validator demands besides, such as `≥ 1`; empty if nothing that can be put so.
        help: What it is for.
        is_dynamic: Whether it may change while a run goes on.
    """

    name: str
    type: str
    bounds: str
    default: str
    help: str
    is_dynamic: bool = False

    @property
    def meaning(self) -> str:
        """The help of the key, and whether it is dynamic."""
        return f"{self.help} Dynamic." if self.is_dynamic else self.help

    @property
    def is_required(self) -> bool:
        """True if a recipe must give it."""
        return self.default == "required"


def keys(cls: type) -> list[Key]:
    """The keys of an attrs class, in its order; those of nested classes by their dotted names."""
    return [
        Key(
            name=name,
            type=(described := describe(field.type)),
            # Literals are checked once more where a class is made by hand; their values are told once.
            bounds=", ".join(bound for bound in _bounds(field.validator) if bound != described),
            default=_default(field),
            help=field.metadata.get("help", ""),
            is_dynamic=bool(field.metadata.get("dynamic")),
        )
        for name, field in fields(cls)
    ]


def as_text(value: Any) -> str:
    """A value as a recipe would write it, with `none` for what is absent or empty."""
    if value is None:
        return "none"
    plain = unstructure(value)
    if isinstance(plain, list):
        return ", ".join(map(str, plain)) or "none"
    return plain if plain == "" else show(plain)


def _default(field: attrs.Attribute[Any]) -> str:
    default: Any = field.default
    if default is attrs.NOTHING or field.metadata.get("required"):
        return "required"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class that its stub calls a function
        return "computed" if default.takes_self else as_text(default.factory())
    return as_text(default)


def _bounds(validator: Any) -> Iterator[str]:
    """The demands of validators in words; those that have none say it when they refuse."""
    for kind, value in demands(validator):
        if kind == "one of":
            yield f"one of {', '.join(map(show, value))}"
        elif kind:
            yield f"{kind} {value:g}" if isinstance(value, int | float) else f"{kind} {value}"
