"""Strict structuring of everything that is not an attrs class: scalars, choices, unions, arrays, tables, JSON."""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, Union, get_args, get_origin

import attrs
import cattrs

from cosmos_core.config.nearest import nearest
from cosmos_core.config.problems import Key, Problem, RefusedError, show

Hook: TypeAlias = Callable[[Any, Any], Any]

_SCALARS: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path (a string)",
}
_ARRAYS: Final[Mapping[Any, Callable[..., Any]]] = {
    tuple: tuple,
    list: list,
    Sequence: tuple,
    set: frozenset,
    frozenset: frozenset,
    AbstractSet: frozenset,
}
_TABLES: Final = (dict, Mapping, MutableMapping)


def register_shapes(converter: cattrs.Converter) -> None:
    """Register the hooks of this module."""
    for cls, hook in ((bool, _exact), (int, _exact), (str, _exact), (float, _float), (Path, _path)):
        converter.register_structure_hook(cls, hook)
    for predicate, factory in (
        (_is_any, _json_hook),
        (_is_enum, _enum_hook),
        (_is_literal, _literal_hook),
        (_is_union, _union_hook),
        (_is_array, _array_hook),
        (_is_table, _table_hook),
    ):
        converter.register_structure_hook_factory(predicate, factory)


def describe(cls: Any) -> str:
    """What a value of an annotation looks like in a recipe, for people."""
    if cls in _SCALARS:
        return _SCALARS[cls]
    if _is_literal(cls):
        return f"one of {', '.join(show(choice) for choice in get_args(cls))}"
    if _is_enum(cls):
        return f"one of {', '.join(show(member.value) for member in cls)}"
    if _is_union(cls):
        return " or ".join(describe(member) for member in _members(cls))
    if _is_array(cls):
        return "an array"
    return "a table" if _is_table(cls) or attrs.has(cls) else "a value"


def _exact(value: Any, cls: Any) -> Any:
    if type(value) is not cls:
        raise RefusedError.of(f"expected {_SCALARS[cls]}, got {show(value)}")
    return value


def _float(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise RefusedError.of(f"expected a number, got {show(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RefusedError.of(f"expected a finite number, got {show(value)}")
    return number


def _path(value: Any, _: Any) -> Path:
    if not isinstance(value, str):
        raise RefusedError.of(f"expected {_SCALARS[Path]}, got {show(value)}")
    return Path(value)


def _is_any(cls: Any) -> bool:
    return cls is Any


def _json_hook(_: Any) -> Hook:
    def hook(value: Any, _: Any) -> Any:
        problems = list(_not_json(value, ()))
        if problems:
            raise RefusedError(problems)
        return value

    return hook


def _not_json(value: Any, path: tuple[Key, ...]) -> Iterator[Problem]:
    """Problems of a free-form value: TOML has dates and non-finite numbers, JSON has not."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_json(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _not_json(item, (*path, index))
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield Problem(path, f"expected a finite number, got {show(value)}")
    elif not isinstance(value, bool | int | str | None):
        yield Problem(path, f"expected a string, a number, true or false, an array or a table, got {show(value)}")


def _is_enum(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, enum.Enum)


def _enum_hook(cls: Any) -> Hook:
    choices = {member.value: member for member in cls}

    def hook(value: Any, _: Any) -> Any:
        return choices[_choose(value, list(choices))]

    return hook


def _is_literal(cls: Any) -> bool:
    return get_origin(cls) is Literal


def _literal_hook(cls: Any) -> Hook:
    choices = list(get_args(cls))

    def hook(value: Any, _: Any) -> Any:
        return _choose(value, choices)

    return hook


def _choose(value: Any, choices: list[Any]) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    allowed = ", ".join(show(choice) for choice in choices)
    close = nearest(value, [choice for choice in choices if isinstance(choice, str)]) if isinstance(value, str) else []
    hint = f"; did you mean {show(close[0])}?" if close else ""
    raise RefusedError.of(f"expected one of {allowed}, got {show(value)}{hint}")


def _is_union(cls: Any) -> bool:
    return get_origin(cls) in (Union, types.UnionType)


def _members(cls: Any) -> list[Any]:
    return [member for member in get_args(cls) if member is not types.NoneType]


def _union_hook(cls: Any, converter: cattrs.Converter) -> Hook:
    members = _members(cls)
    hooks = [converter.get_structure_hook(member) for member in members]
    optional = len(members) < len(get_args(cls))

    def hook(value: Any, _: Any) -> Any:
        if value is None and optional:
            return None
        refusals: list[RefusedError] = []
        for member, member_hook in zip(members, hooks, strict=True):
            try:
                return member_hook(value, member)
            except RefusedError as refusal:
                refusals.append(refusal)
        # A problem inside a container says more than "neither this nor that".
        deep = [refusal for refusal in refusals if any(problem.path for problem in refusal.problems)]
        if len(refusals) == 1 or deep:
            raise (deep or refusals)[0]
        raise RefusedError.of(f"expected {describe(cls)}, got {show(value)}")

    return hook


def _is_array(cls: Any) -> bool:
    return cls in _ARRAYS or get_origin(cls) in _ARRAYS


def _array_hook(cls: Any, converter: cattrs.Converter) -> Hook:
    origin, arguments = get_origin(cls) or cls, get_args(cls)
    is_fixed = origin is tuple and bool(arguments) and arguments[-1] is not Ellipsis
    members = list(arguments) if is_fixed else [arguments[0] if arguments else Any]
    hooks = [converter.get_structure_hook(member) for member in members]

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise RefusedError.of(f"expected an array, got {show(value)}")
        if is_fixed and len(value) != len(members):
            raise RefusedError.of(f"expected an array of {len(members)} values, got {show(value)}")
        items, problems = [], []
        for index, item in enumerate(value):
            place = index if is_fixed else 0
            try:
                items.append(hooks[place](item, members[place]))
            except RefusedError as refusal:
                problems += refusal.under(index)
        if problems:
            raise RefusedError(problems)
        return _ARRAYS[origin](items)

    return hook


def _is_table(cls: Any) -> bool:
    return cls in _TABLES or get_origin(cls) in _TABLES


def _table_hook(cls: Any, converter: cattrs.Converter) -> Hook:
    member = get_args(cls)[1] if get_args(cls) else Any
    member_hook = converter.get_structure_hook(member)

    def hook(value: Any, _: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise RefusedError.of(f"expected a table, got {show(value)}")
        items, problems = {}, []
        for key, item in value.items():
            try:
                items[key] = member_hook(item, member)
            except RefusedError as refusal:
                problems += refusal.under(key)
        if problems:
            raise RefusedError(problems)
        return items

    return hook
