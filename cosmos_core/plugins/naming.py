"""How a plugin may be named: one rule, for those that are made here and for those that are found."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

RULE: Final = "a name is lower-case words of letters and digits joined by -, and begins with a letter"

_VALID: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def is_valid(name: str) -> bool:
    """Whether a name keeps the rule, so that it can be typed anywhere and be part of a package's name."""
    return _VALID.fullmatch(name) is not None


def nearest_valid(name: str) -> str:
    """A valid name that looks like `name`; empty if there is none."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", plain).lower()
    return "-".join(re.findall(r"[a-z0-9]+", apart)).lstrip("-0123456789")
