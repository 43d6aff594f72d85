"""Functions and methods as their source declares them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

_WIDEST: Final = 100


def declaration(function: Callable[..., Any] | property) -> str:
    """The line (or lines, where it is long) that declares a function, a method or a property."""
    if isinstance(function, property):
        assert function.fget is not None
        return f"@property\n{declaration(function.fget)}"
    arguments = list(_arguments(function))
    result = inspect.signature(function).return_annotation
    head = f"async def {function.__name__}" if inspect.iscoroutinefunction(function) else f"def {function.__name__}"
    line = f"{head}({', '.join(arguments)}) -> {result}"
    if len(line) <= _WIDEST:
        return line
    return "\n".join([f"{head}(", *(f"    {argument}," for argument in arguments), f") -> {result}"])


def _arguments(function: Callable[..., Any]) -> Iterator[str]:
    """Each argument with its annotation and default; the protocols annotate in text, so nothing is abbreviated."""
    has_star = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not has_star:
            has_star = True
            yield "*"
        annotation = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        yield f"{parameter.name}{annotation}{default}"
