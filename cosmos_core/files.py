"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file; readers, and whoever comes after a crash, find the old one or the new one, never a part.

    The mode is less what the process's umask takes away. An OSError leaves nothing of the new file.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
