"""Plain data to attrs instances and back: one strict converter for recipes, options and jobs.

Nothing is coerced (an integer may stand for a float), unknown keys are refused, and every problem is
reported at once, each with the full path of its key.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import attrs
import cattrs

from cosmos_core.config.nearest import suggestion
from cosmos_core.config.problems import Problem, RefusedError, show
from cosmos_core.config.shapes import register_shapes

T = TypeVar("T")
Hook: TypeAlias = Callable[[Any, Any], Any]


def structure(data: Any, cls: type[T], path: str = "") -> T:
    """Make an instance of an attrs class from plain data.

    Args:
        data: What TOML or JSON gave.
        cls: An attrs class; its annotations say what is allowed and its validators are honoured.
        path: Key path of `data`, for error messages.

    Raises:
        ConfigError: Lists every problem: its key's path, the value seen, what is allowed, the nearest name.
    """
    try:
        return _CONVERTER.structure(data, cls)
    except RefusedError as refusal:
        raise refusal.as_config_error(path) from None


def check_class(cls: type) -> None:
    """Check that instances of an attrs class can be made from plain data.

    Raises:
        TypeError: It is no attrs class, or one of its annotations says nothing that a recipe can express.
        NameError: One of its annotations cannot be resolved at run time.
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


def _refuse_type(cls: Any) -> Hook:
    raise TypeError(f"a recipe cannot express a value of type {cls!r}")


def _attrs_hook(cls: type, converter: cattrs.Converter) -> Hook:
    fields = {field.alias: field for field in attrs.fields(attrs.resolve_types(cls)) if field.init}
    hooks = {key: converter.get_structure_hook(_annotation(field)) for key, field in fields.items()}

    def hook(data: Any, _: Any) -> Any:
        if not isinstance(data, Mapping):
            raise RefusedError.of(f"expected a table, got {show(data)}")
        problems = [
            Problem((key,), f"unknown option; {suggestion(str(key), fields)}") for key in data if key not in fields
        ]
        values: dict[str, Any] = {}
        for key, field in fields.items():
            try:
                if key in data:
                    values[key] = hooks[key](data[key], _annotation(field))
                else:
                    values.update(_default(key, field))
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


def _default(key: str, field: attrs.Attribute[Any]) -> dict[str, Any]:
    """The default of a field that was not given, so that validators of others may look at it."""
    default: Any = field.default
    if default is attrs.NOTHING:
        meaning = field.metadata.get("help", "")
        raise RefusedError.of(f"required, but not given. {meaning}" if meaning else "required, but not given")
    if not isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class that its stub calls a function
        return {key: default}
    return {} if default.takes_self else {key: default.factory()}


def _annotation(field: attrs.Attribute[Any]) -> Any:
    return Any if field.type is None else field.type


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(structure_fallback_factory=_refuse_type, detailed_validation=False)
    register_shapes(converter)
    converter.register_structure_hook_factory(attrs.has, _attrs_hook)
    return converter


_CONVERTER: Final = _make_converter()
