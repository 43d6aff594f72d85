"""Records (attrs classes), choices (enums) and aliases of a protocol module, as Markdown."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import attrs

from reference.markdown import table

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def summary(thing: Any) -> str:
    """A docstring without its sections of arguments, attributes and errors."""
    return re.split(r"\n\n(?:Attributes|Args|Returns|Raises):\n", inspect.getdoc(thing) or "")[0]


def details(thing: Any) -> str:
    """The arguments, the result and the errors that a docstring explains, as a list."""
    _, *sections = re.split(r"\n\n(Args|Returns|Raises):\n", inspect.getdoc(thing) or "")
    lines: list[str] = []
    for title, section in zip(sections[::2], sections[1::2], strict=True):
        if title == "Returns":
            lines.append(f"- returns {_one_line(section)}")
            continue
        prefix = "raises " if title == "Raises" else ""
        lines += [f"- {prefix}`{name}`: {_one_line(meaning)}" for name, meaning in _ATTRIBUTE.findall(section)]
    return "\n".join(lines)


def record(cls: type) -> str:
    """The fields of an attrs class."""
    meanings = _meanings(cls)
    # As written: attrs' own types are resolved once a converter has seen the class.
    written = {
        name: hint for base in reversed(cls.__mro__) for name, hint in vars(base).get("__annotations__", {}).items()
    }
    rows = [
        (f"`{field.name}`", f"`{written[field.name]}`", _default(field), meanings.get(field.name, ""))
        for field in attrs.fields(cls)
    ]
    return table(("field", "type", "default", "what"), rows)


def choices(cls: type[enum.Enum]) -> str:
    """The members of an enum."""
    meanings = _meanings(cls)
    return table(("value", "what"), [(f"`{member.value}`", meanings.get(member.name, "")) for member in cls])


def aliases(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(name, what it stands for) of each public type alias of a module."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            assert node.value is not None
            yield ast.unparse(node.target), ast.unparse(node.value)


def _meanings(cls: type) -> Mapping[str, str]:
    """What each attribute means: from the class's docstring, or from the string below the attribute."""
    _, _, section = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    return {**dict(_ATTRIBUTE.findall(section)), **dict(_strings_below(cls))}


def _strings_below(cls: type) -> Iterator[tuple[str, str]]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    name = ""
    for node in definition.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=found)) | ast.Assign(targets=[ast.Name(id=found)]):
                name = found
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                yield name, text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return ""
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]  # a class that its stub calls a function
        return f"`{field.default.factory()!r}`"
    return f"`{_shown(field.default)}`"


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}" if value else "frozenset()"
    return value.__name__ if isinstance(value, type) or inspect.isfunction(value) else repr(value)
