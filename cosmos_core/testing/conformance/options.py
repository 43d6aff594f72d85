"""What is wrong with an options class: the same for `cosmos plugins check` and for the kit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs

from cosmos_core.config.reference import fields

_MUTABLE: Final = (list, dict, set, bytearray)


def option_faults(cls: type) -> Iterator[str]:
    """Everything that is wrong with an options class, each as a message for its author."""
    yield from filter(None, (not_frozen(cls), undocumented(cls), shared_defaults(cls)))


def not_frozen(cls: type) -> str:
    """Which of the classes can be written to; empty if none can."""
    loose = [each.__name__ for each in _classes(cls) if not _is_frozen(each)]
    if not loose:
        return ""
    return f"{', '.join(loose)} is not frozen; declare it with @attrs.frozen(kw_only=True)"


def undocumented(cls: type) -> str:
    """Which options say nothing of themselves; empty if all do."""
    silent = [name for name, field in fields(cls) if not field.metadata.get("help")]
    if not silent:
        return ""
    return (
        f"options without a help text: {', '.join(silent)}; declare them as "
        "name: type = option(default, help='What it is for.')"
    )


def shared_defaults(cls: type) -> str:
    """Which options share one mutable default between all instances; empty if none does."""
    shared = [name for name, field in fields(cls) if isinstance(field.default, _MUTABLE)]
    return f"options whose default is one object for all instances: {', '.join(shared)}; use factory=" if shared else ""


def _classes(cls: type) -> Iterator[type]:
    """An options class and those of the tables in it."""
    yield cls
    for field in attrs.fields(attrs.resolve_types(cls)):
        if isinstance(field.type, type) and attrs.has(field.type):
            yield from _classes(field.type)


def _is_frozen(cls: type) -> bool:
    own = attrs.fields(cls)
    instance: Any = object.__new__(cls)
    try:
        for field in own:
            setattr(instance, field.name, None)
    except attrs.exceptions.FrozenInstanceError:
        return True
    except (TypeError, ValueError, AttributeError):
        # A validator that refuses None was asked, so the attribute can be set.
        return False
    return not own
