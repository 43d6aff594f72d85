"""The page's token: random, one a run, in a file that only its owner can read."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from cosmos_core.errors import TransportError

NAME: Final = "page.token"
_BYTES: Final = 32
_FORM: Final = re.compile(r"[A-Za-z0-9_-]{43}")


def run_token(directory: Path) -> str:
    """The token of a run; made where there is none yet, or where others could have read or chosen it.

    Args:
        directory: The run's folder.

    Raises:
        TransportError: It could not be written.
    """
    path = directory / NAME
    try:
        if (known := _read(path)) is not None:
            return known
        token = secrets.token_urlsafe(_BYTES)
        draft = path.with_name(f".{NAME}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{token}\n")
        draft.replace(path)
    except OSError as error:
        raise TransportError(f"{path}: the page's token cannot be kept: {error.strerror}") from error
    return token


def _read(path: Path) -> str | None:
    """What a file holds if it is a token that nobody else could read or write."""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        found = path.lstat()
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        token = path.read_text(encoding="ascii").strip() if is_ours else ""
        if _FORM.fullmatch(token):
            return token
    return None
