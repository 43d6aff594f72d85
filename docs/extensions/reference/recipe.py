"""The directive `recipe-reference`: every table and key of the recipe, from the attrs classes of the schema."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from operator import ge, gt, le, lt
from typing import Any

import attrs
from sphinx.application import Sphinx

from cosmos_core.config.schema import Recipe
from reference.markdown import directive, table

_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}
_BOUNDS = {ge: "≥", gt: ">", le: "≤", lt: "<"}


def setup(app: Sphinx) -> Mapping[str, bool]:
    """Register the directive."""
    app.add_directive("recipe-reference", directive(lambda _: reference(), takes_argument=False))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def reference() -> str:
    """The whole reference as Markdown."""
    seen: dict[type, str] = {}
    return "\n".join(_table(path, cls, seen) for path, cls in _tables(Recipe))


def _tables(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """(path, class) of each table below a class, in the schema's order."""
    hints = typing.get_type_hints(cls)
    for field in attrs.fields(cls):
        inner, is_array = _inner(hints[field.name])
        if inner is not None:
            key = f"{path}.{field.name}" if path else field.name
            yield (f"[[{key}]]" if is_array else f"[{key}]"), inner
            yield from _tables(inner, key)


def _inner(hint: Any) -> tuple[type | None, bool]:
    """The attrs class that a key holds, and whether it holds an array of them."""
    if isinstance(hint, type) and attrs.has(hint):
        return hint, False
    inner = next((a for a in typing.get_args(hint) if isinstance(a, type) and attrs.has(a)), None)
    return inner, inner is not None and typing.get_origin(hint) is tuple


def _table(path: str, cls: type, seen: dict[type, str]) -> str:
    heading = f"## `{path}`\n\n{cls.__doc__}\n"
    if cls in seen:
        return f"{heading}\nThe same keys as in `{seen[cls]}`.\n"
    seen[cls] = path
    hints = typing.get_type_hints(cls)
    fields = [field for field in attrs.fields(cls) if _inner(hints[field.name])[0] is None]
    rows = [
        (
            f"`{field.name}`",
            f"{_type(hints[field.name])}{_bounds(field.validator)}",
            _default(field),
            f"{field.metadata['help']} Dynamic." if field.metadata["dynamic"] else field.metadata["help"],
        )
        for field in fields
    ]
    return f"{heading}\n{table(('key', 'type', 'default', 'what'), rows)}\n"


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f'`"{choice}"`' for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        named = [_NAMES[argument] for argument in arguments if argument is not Ellipsis]
        return f"array of {named[0]}s" if Ellipsis in arguments else f"array of {len(named)} {named[0]}s"
    return _NAMES.get(hint, "table")


def _bounds(validator: Any) -> str:
    """Bounds and patterns of a validator, after a comma."""
    inner = getattr(validator, "_validators", None)
    if inner is not None:
        return "".join(_bounds(each) for each in inner)
    if hasattr(validator, "compare_func"):
        bound = validator.bound
        return f", {_BOUNDS[validator.compare_func]} {bound:g}"
    if hasattr(validator, "pattern"):
        return f", matches `{validator.pattern.pattern}`"
    return ""


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    value = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(repr, value))}]`"
    return "empty" if value == {} else f"`{value!r}`".replace("'", '"')
