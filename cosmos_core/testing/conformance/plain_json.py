"""Whether a value is plain JSON: what rows and scores carry travels between processes as nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

_INTEGERS: Final = range(-(2**63), 2**64)
_ITERABLES: Final = (tuple, set, frozenset)


def json_problems(value: Any, path: str) -> Iterator[str]:
    """Where a value is no plain JSON, why, and what to write instead.

    Args:
        value: Anything.
        path: Its name in the messages.
    """
    match value:
        case list():
            for index, item in enumerate(value):
                yield from json_problems(item, f"{path}[{index}]")
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    yield f"{path} has the key {key!r}, a {type(key).__name__}; keys are text"
                yield from json_problems(item, f"{path}[{key!r}]")
        case _:
            problem = _scalar_problem(value)
            if problem:
                yield f"{path} is {value!r:.100}, {problem}"


def _scalar_problem(value: Any) -> str:
    match value:
        case bool() | None:
            return ""
        case str():
            return "" if _is_encodable(value) else "text that UTF-8 cannot hold; replace half surrogate pairs"
        case int():
            return "" if value in _INTEGERS else "more than 64 bits; write it as text"
        case float():
            return "" if math.isfinite(value) else "which JSON cannot hold; leave it out, or use None"
        case _:
            wanted = "a list" if isinstance(value, _ITERABLES) else "text, numbers, lists and dicts"
            return f"a {type(value).__name__}; use {wanted}"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
