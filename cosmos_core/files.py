"""Writes files as a whole: after a crash, a file is the old one or the new one, never a part."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import time
from pathlib import Path
from typing import Final

_STALE_S: Final = 3600.0
"""Age of a draft whose writer was killed. Its process id would tell nothing: other machines may share the folder."""


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file; readers find the old one or the new one, never a part.

    The mode is less what the process's umask takes away. An OSError leaves nothing of the new file. Drafts of writers
    that were killed are removed.
    """
    for stale in path.parent.glob(f".{glob.escape(path.name)}.????????.draft"):
        with contextlib.suppress(OSError):
            if time.time() - stale.stat().st_mtime > _STALE_S:
                stale.unlink()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
