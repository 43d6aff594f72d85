"""Plain data to attrs instances and back: one strict converter for recipes, options and jobs.

Nothing is coerced (an integer may stand for a float), unknown keys are refused, and every problem is
reported at once, each with the full path of its key.
"""

from __future__ import annotations

import enum
import json
import math
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

import attrs
import cattrs

from cosmos_core.config.problems import ELSEWHERE, Key, Problem, RefusedError, nearest, show
from cosmos_core.errors import ConfigError

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


def describe(cls: Any) -> str:
    """Describe the values of an annotation in a recipe, for people."""
    if cls in _SCALARS:
        return _SCALARS[cls]
    if choices := _choices(cls):
        return f"one of {', '.join(map(show, choices))}"
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


def _json(value: Any, _: Any) -> Any:
    if problems := list(_not_json(value, ())):
        raise RefusedError(problems)
    return value


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


def _choices(cls: Any) -> Sequence[Any]:
    """The values of a `Literal` or of an enumeration; none of another type."""
    if get_origin(cls) is Literal:
        return get_args(cls)
    return [member.value for member in cls] if isinstance(cls, type) and issubclass(cls, enum.Enum) else ()


def _choose(value: Any, cls: Any) -> Any:
    choices = _choices(cls)
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return cls(choice) if isinstance(cls, type) else choice
    allowed = ", ".join(show(choice) for choice in choices)
    close = nearest(value, [choice for choice in choices if isinstance(choice, str)]) if isinstance(value, str) else []
    if (same := ELSEWHERE.get(str(value), "")) in choices:
        close = [same]
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


T = TypeVar("T")


def structure(data: Any, cls: type[T], path: str = "") -> T:
    """Make an instance of an attrs class from plain data, as TOML or JSON gives it.

    The class's annotations say what is allowed; its validators are honoured. `path` is the key path of the data. A
    ConfigError lists every problem: its key's path, the value seen, what is allowed, the nearest name.
    """
    try:
        return _CONVERTER.structure(data, cls)
    except RefusedError as refusal:
        raise ConfigError("\n".join(problem.render(path) for problem in refusal.problems)) from None


def check_class(cls: type) -> None:
    """Check that instances of an attrs class can be made from plain data.

    Else it is a TypeError, or a NameError for an annotation that cannot be resolved at run time.
    """
    if not (isinstance(cls, type) and attrs.has(cls)):
        raise TypeError(f"{cls!r} is no attrs class")
    _CONVERTER.get_structure_hook(cls)


def unstructure(value: Any) -> Any:
    """Plain data (dict, list, str, int, float, bool, None) of an instance, for TOML, JSON and MessagePack."""
    if attrs.has(type(value)):
        return {field.name: unstructure(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {key: unstructure(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [unstructure(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(unstructure(item) for item in value)
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def fields(cls: type, prefix: str = "") -> Iterator[tuple[str, attrs.Attribute[Any]]]:
    """(dotted name, field) of an attrs class, where a nested class stands for its own fields."""
    for field in attrs.fields(attrs.resolve_types(cls)):
        name = f"{prefix}{field.alias}"
        if isinstance(field.type, type) and attrs.has(field.type):
            yield from fields(field.type, f"{name}.")
        else:
            yield name, field


def _refuse_type(cls: Any) -> Hook:
    raise TypeError(f"a recipe cannot express a value of type {cls!r}")


def _attrs_hook(cls: type, converter: cattrs.Converter) -> Hook:
    own = {field.alias: field for field in attrs.fields(attrs.resolve_types(cls)) if field.init}
    hooks = {key: converter.get_structure_hook(_annotation(field)) for key, field in own.items()}

    def hook(data: Any, _: Any) -> Any:
        if not isinstance(data, Mapping):
            raise RefusedError.of(f"expected a table, got {show(data)}")
        problems = [
            Problem((key,), "unknown option", known=(own, [name for name, _ in fields(cls)]))
            for key in data
            if key not in own
        ]
        values: dict[str, Any] = {}
        for key, field in own.items():
            try:
                if key in data:
                    values[key] = hooks[key](data[key], _annotation(field))
                else:
                    values.update(_default(key, field, hooks[key]))
            except RefusedError as refusal:
                problems += refusal.under(key)
        return _build(cls, values, problems)

    return hook


def _build(cls: type, values: dict[str, Any], problems: list[Problem]) -> Any:
    """Make the instance, or raise everything that is wrong with it, validators of the good fields included."""
    problems = problems + _validate(cls, values)
    if problems:
        raise RefusedError(problems)
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise RefusedError.of(str(error)) from error


def _validate(cls: type, values: dict[str, Any]) -> list[Problem]:
    """Run the validator of each good field against an instance that has only these fields."""
    partial: Any = object.__new__(cls)
    good = [field for field in attrs.fields(cls) if field.alias in values]
    for field in good:
        object.__setattr__(partial, field.name, values[field.alias])
    problems = []
    for field in good:
        if field.validator is None or field.converter is not None:
            continue  # the constructor converts first, then validates
        value = values[field.alias]
        try:
            field.validator(partial, field, value)
        except (ValueError, TypeError) as error:
            problems.append(Problem((field.alias,), _explain(error, field.name, value)))
        except AttributeError as error:
            # The validator looks at a field that is absent or wrong itself; the constructor has the last word.
            if getattr(error, "obj", None) is not partial:
                raise
    return problems


def _explain(error: Exception, name: str, value: Any) -> str:
    """A validator's message without the field's name, which the path already says."""
    text = str(error.args[0]) if error.args else type(error).__name__
    text = text.removeprefix(f"'{name}' ").removeprefix(f"{name} ").removeprefix(f"{name}: ")
    if text.endswith(f": {value}"):
        return f"{text.removesuffix(f': {value}')}, got {show(value)}"
    return text if "got" in text or str(value) in text else f"{text}, got {show(value)}"


def _default(key: str, field: attrs.Attribute[Any], hook: Hook) -> dict[str, Any]:
    """The default of a field that was not given, for validators of others; a table is empty, and may lack a key."""
    default: Any = field.default
    if default is attrs.NOTHING or field.metadata.get("required"):
        meaning = field.metadata.get("help", "")
        raise RefusedError.of(f"required, but not given. {meaning}" if meaning else "required, but not given")
    if not isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class that its stub calls a function
        return {key: default}
    if attrs.has(default.factory):
        return {key: hook({}, default.factory)}
    return {} if default.takes_self else {key: default.factory()}


def _annotation(field: attrs.Attribute[Any]) -> Any:
    return Any if field.type is None else field.type


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(structure_fallback_factory=_refuse_type, detailed_validation=False)
    for cls, hook in ((bool, _exact), (int, _exact), (str, _exact), (float, _float), (Path, _path)):
        converter.register_structure_hook(cls, hook)
    converter.register_structure_hook_func(lambda cls: cls is Any, _json)
    converter.register_structure_hook_func(lambda cls: bool(_choices(cls)), _choose)
    for predicate, factory in (
        (_is_union, _union_hook),
        (_is_array, _array_hook),
        (_is_table, _table_hook),
        (attrs.has, _attrs_hook),
    ):
        converter.register_structure_hook_factory(predicate, factory)
    return converter


_CONVERTER: Final = _make_converter()


_CHECKSUM: Final = "checksum"


def with_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data and the CRC-32 of its JSON, by which `without_checksum` finds what was changed in a file."""
    return {**data, _CHECKSUM: zlib.crc32(json.dumps(data).encode())}


def without_checksum(data: Any, file: str) -> Any:
    """Data that was read from a file, without its checksum, if it has one; a ConfigError if that is of other data."""
    if not isinstance(data, Mapping) or _CHECKSUM not in data:
        return data
    own = {key: value for key, value in data.items() if key != _CHECKSUM}
    if data != with_checksum(own):
        raise ConfigError(
            f"{file} is damaged: its content does not have its checksum; restore it, or remove its entry "
            f'"{_CHECKSUM}" if it was changed on purpose'
        )
    return own
