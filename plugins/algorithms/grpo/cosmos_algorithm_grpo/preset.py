"""A preset is an options class with other defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

Fields: TypeAlias = list["attrs.Attribute[Any]"]


def defaults(**values: Any) -> Callable[[type, Fields], Fields]:
    """For `attrs.frozen(field_transformer=...)`: what inherited fields are where a recipe does not say.

    Raises:
        TypeError: The class has no such field.
    """

    def transform(cls: type, fields: Fields) -> Fields:
        unknown = values.keys() - {field.name for field in fields}
        if unknown:
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
        return [field.evolve(default=values.get(field.name, field.default)) for field in fields]

    return transform
