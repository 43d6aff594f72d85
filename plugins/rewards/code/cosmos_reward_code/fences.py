"""The program in what a model wrote."""

from __future__ import annotations

import re
from typing import Final

_FENCED: Final = re.compile(r"^```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)^```[ \t]*\r?$", re.MULTILINE | re.DOTALL)


def program_in(text: str, *, needs_fence: bool) -> str | None:
    """The last block between lines of ``` (of Python, or of no language); without any, the text or None."""
    blocks = _FENCED.findall(text)
    if blocks:
        return str(blocks[-1])
    return None if needs_fence else text
