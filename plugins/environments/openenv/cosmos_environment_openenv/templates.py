"""Templates: JSON in whose strings names in braces, such as `{observation.message}`, stand for values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from cosmos_core.types import JSON

_PLACE: Final = re.compile(r"\{([A-Za-z_]\w*(?:\.[\w-]+)*)\}")
_NUMBER: Final = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)


class AbsentError(LookupError):
    """A template names what there is not; the message says what there is."""


def filled(template: JSON | Mapping[str, JSON], values: Mapping[str, JSON]) -> JSON:
    """A template with its values: a string that is one name becomes the value itself, a name in a string its text.

    Raises:
        AbsentError: There is no such value.
    """
    if isinstance(template, str):
        if whole := _PLACE.fullmatch(template):
            return _value(whole[1], values)
        return _PLACE.sub(lambda found: shown(_value(found[1], values)), template)
    if isinstance(template, Mapping):
        return {name: filled(each, values) for name, each in template.items()}
    return [filled(each, values) for each in template] if isinstance(template, list | tuple) else template


def names(template: JSON | Mapping[str, JSON]) -> Iterator[str]:
    """The values that a template names, each by the first part of its name."""
    if isinstance(template, str):
        yield from (found[1].partition(".")[0] for found in _PLACE.finditer(template))
    elif isinstance(template, Mapping | list | tuple):
        for each in template.values() if isinstance(template, Mapping) else template:
            yield from names(each)


def shown(value: JSON) -> str:
    """A value as text: text as it is, nothing as nothing, anything else as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _value(name: str, values: Mapping[str, JSON]) -> JSON:
    found: JSON = dict(values)
    for place, part in enumerate(parts := name.split(".")):
        if not isinstance(found, Mapping) or part not in found:
            there = ", ".join(map(repr, found)) or "nothing" if isinstance(found, Mapping) else f"{found!r:.80}"
            raise AbsentError(f"no {part!r} in {'.'.join(parts[:place]) or 'the values'}, which has {there:.200}")
        found = found[part]
    return found


def number(text: str) -> JSON:
    """The last number in the last line of a turn.

    Raises:
        ValueError: There is none, or it is too large.
    """
    lines = text.strip().splitlines()
    found = _NUMBER.findall(lines[-1]) if lines else []
    if not found:
        raise ValueError("there is no number in the last line")
    value = float(found[-1])
    if not math.isfinite(value):
        raise ValueError("the number is too large")
    return int(found[-1]) if found[-1].lstrip("+-").isdigit() else value


def json_object(text: str) -> JSON:
    """The JSON object that begins with the first brace of a turn.

    Raises:
        ValueError: There is none.
    """
    try:
        value: JSON = _DECODER.raw_decode(text, text.index("{"))[0]
    except (ValueError, RecursionError) as error:
        raise ValueError("there is no JSON object") from error
    return value


def _finite(word: str) -> float:
    """A number that JSON has: neither NaN nor one that is too large."""
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word} is no number")
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
