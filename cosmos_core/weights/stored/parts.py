"""The form of stored versions.

`<directory>/<run id>/v<version>-<digest>/` holds, for each process that published a part of the version, the bytes of
its snapshot (`<token>.bin`) and a description (`<share>.json`), which is written last: a part without one is not there.
Parts of one share are alike, whichever replica wrote them. A version is complete once its parts are all of the model.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import msgspec

from cosmos_core.errors import WeightSyncError
from cosmos_core.storage import file_system
from cosmos_core.weights import wire

FORMAT: Final = 1
BLOCK_BYTES: Final = 1 << 20
"""Unit of checksums, hence of reading."""

_VERSION: Final = re.compile(r"v(\d+)-\w+")


@attrs.frozen(kw_only=True)
class StoredPart:
    """Description of a part.

    Attributes:
        format: `FORMAT` of the release that wrote it.
        run_id: Whose weights they are.
        manifest: What it holds; `path` is the name of the file with the bytes.
        block_bytes: Size of the blocks of that file, the last of which may be shorter.
        checksums: CRC-32 of each block.
    """

    format: int
    run_id: str
    manifest: wire.Manifest
    block_bytes: int
    checksums: tuple[int, ...]


def version_folder(directory: str, run_id: str, version: int, digest: str) -> str:
    """Where the parts of a version are."""
    return f"{run_folder(directory, run_id)}/v{version}-{digest}"


def run_folder(directory: str, run_id: str) -> str:
    """Where a run's versions are."""
    return f"{directory.rstrip('/')}/{run_id}"


def version_of(name: str) -> int | None:
    """The version of a folder's name; None if it is none of ours."""
    match = _VERSION.fullmatch(name)
    return int(match[1]) if match else None


def share_of(manifest: wire.Manifest) -> str:
    """A name for what a part holds: equal for parts of the same tensors, slices and dtypes."""
    held = [attrs.evolve(entry, offset=0) for entry in manifest.entries]
    return hashlib.sha256(msgspec.json.encode(held)).hexdigest()[:16]


def checksum(block: bytes | memoryview) -> int:
    """CRC-32 of a block."""
    return zlib.crc32(block)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Name a path or URL with which a body fails.

    Raises:
        WeightSyncError: It does.
    """
    try:
        yield
    except WeightSyncError:
        raise
    except Exception as error:
        # Libraries of file systems raise errors of their own: botocore's, for one, are no OSError.
        reason = str(error).strip().partition("\n")[0]
        kind = "" if reason and isinstance(error, OSError) else f"{type(error).__name__}: "
        raise WeightSyncError(f"{what}: {kind}{reason}".removesuffix(": ")) from error


@contextmanager
def access(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of a URL, and the path in it.

    Raises:
        WeightSyncError: What the body does with it fails, or there is no such file system.
    """
    with told(f"weights at {url}"):
        files, root = file_system(url)
        files.invalidate_cache()
        yield files, root.rstrip("/")
