"""A value of a single key."""

from __future__ import annotations

from typing import TypeAlias

Scalar: TypeAlias = bool | int | float | str | None
