"""What a plugin declares of itself, with the meaning of each item from the record's own documentation."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import attrs

from cosmos_core.config.reference import as_text

_ITEM: Final = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


@attrs.frozen(kw_only=True)
class Declared:
    """One capability.

    Attributes:
        name: Its name in the record.
        value: What the plugin declares, as text.
        meaning: What the record's docstring says of it.
    """

    name: str
    value: str
    meaning: str


def declared(capabilities: object) -> list[Declared]:
    """The items of a capabilities record; none for a kind that declares nothing."""
    cls: Any = type(capabilities)
    if not attrs.has(cls):
        return []
    meanings = _meanings(cls)
    return [
        Declared(
            name=field.name,
            value=as_text(getattr(capabilities, field.name)),
            meaning=meanings.get(field.name, ""),
        )
        for field in attrs.fields(cls)
    ]


def _meanings(cls: type) -> dict[str, str]:
    """The items of the `Attributes:` section of a docstring."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    return {name: " ".join(text.split()) for name, text in _ITEM.findall(section)}
