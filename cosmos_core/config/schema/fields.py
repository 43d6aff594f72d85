"""What fields of a recipe are made with: `option`, and the bounds that several of them share."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import validators as check

POSITIVE = check.ge(1)
NOT_NEGATIVE = check.ge(0)
ABOVE_ZERO = check.gt(0.0)
FRACTION = check.and_(check.ge(0.0), check.le(1.0))
LEAST_TEMPERATURE = 0.01
"""A run goes on with at least this: below it, not every engine draws at the temperature that it is asked for."""
NAME = check.matches_re(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,  # noqa: A002 - the users' word for it
    validator: Any = None,
    factory: Any = None,
    dynamic: Any = False,
) -> Any:
    """An attrs field of a recipe, or of a plugin's options.

    Args:
        default: What it is where a recipe does not say.
        help: What it is for, for users.
        validator: What it must be.
        factory: Makes the default, in place of it.
        dynamic: Whether it may change while a run goes on (`cosmos set`): a truth value, a number or a string, absent
            or not, whose validators are of `ge`, `gt`, `le`, `lt`, `in_`, `optional` and `and_`. A validator says what
            it must be then, besides. Of plugins, options of algorithms may be.
    """
    metadata = {"help": help, "dynamic": dynamic}
    if factory is not None:
        return attrs.field(factory=factory, validator=validator, metadata=metadata)
    return attrs.field(default=default, validator=validator, metadata=metadata)
