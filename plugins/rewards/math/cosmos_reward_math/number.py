"""Numbers as people write them, read as exact decimals."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

NUMBER: Final = re.compile(
    r"""
    (?P<sign>[+-]?) \$? (?P<sign_after_dollar>[+-]?)
    (?P<digits> (?: [0-9]{1,3} (?:,[0-9]{3})+ | [0-9]+ ) (?:\.[0-9]+)? | \.[0-9]+ )
    \.?
    """,
    re.VERBOSE,
)


def read_number(text: str) -> Decimal | None:
    """The number that `text` is, or None if it is anything else besides.

    Thousands may be grouped by commas, a dollar sign may lead and a period may end it.
    """
    match = NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["sign_after_dollar"]):
        return None
    sign = match["sign"] or match["sign_after_dollar"]
    return Decimal(sign + match["digits"].replace(",", ""))
