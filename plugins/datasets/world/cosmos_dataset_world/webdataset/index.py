"""The index of a tar, a file of one line a clip: made once for all processes of a machine, found again by the tar.

A clip is what follows each other and has one name up to the first dot of the file's name, as WebDataset has it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from fsspec.implementations.local import LocalFileSystem

from cosmos_core.errors import StorageError
from cosmos_core.storage import cache_folder, file_system, told
from cosmos_dataset_world.clips.clip import EMBEDDINGS, IMAGES, PICKLES, VIDEOS
from cosmos_dataset_world.webdataset.members import Member, Torn, walk

FORMAT: Final = 2
_AHEAD_BYTES: Final = 1 << 18
"""Read at once of a tar elsewhere while its headers are looked for."""

_MAX_CAPTION_BYTES: Final = 1 << 20


def index_of(url: str, caption: str) -> Path:
    """The file that tells what is in a tar; made if there is none of the tar as it is now.

    Each line is an object with `name`, and `problem` of what is torn, or else `caption` and for `video`, `image` and
    `embedding`, where they are, `[name, offset, size, checksum]`.

    Args:
        url: Path or URL of the tar.
        caption: Extension of the members with captions, or `json:FIELD`.

    Raises:
        StorageError: The tar cannot be read, or the cache cannot be written.
    """
    with told(url):
        store, path = file_system(url)
        store.invalidate_cache(path)
        said = store.info(path)
        size = int(said["size"])
        tag = said.get("ETag") or said.get("mtime") or ""
        key = hashlib.sha256(repr((FORMAT, url, size, str(tag), caption)).encode()).hexdigest()[:32]
        index = cache_folder() / "world" / "tars" / f"{key}.jsonl"
        if not index.exists():
            with _opened(store, path) as file:
                lines = [json.dumps(line) for line in _clips(file, size, caption)]
            _write(index, lines)
    return index


def _opened(store: Any, path: str) -> Any:
    if isinstance(store, LocalFileSystem):
        return Path(path).open("rb")
    return store.open(path, "rb", block_size=_AHEAD_BYTES, cache_type="readahead")


def _write(index: Path, lines: list[str]) -> None:
    partial = index.with_name(f".{secrets.token_hex(6)}.partial")
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        partial.rename(index)
    except OSError as error:
        raise StorageError(f"{index} cannot be written: {error}; set COSMOS_CACHE to another folder") from error


def _clips(file: BinaryIO, size: int, caption: str) -> Iterator[dict[str, Any]]:
    extension, _, field = caption.partition(":")
    clip: dict[str, Any] = {}
    for found in walk(file, size):
        if isinstance(found, Torn):
            if clip:
                yield clip
            clip = {}
            yield {"name": f"byte {found.offset}", "problem": f"the tar is torn: {found.reason}"}
            continue
        name, suffix = _key(found.name)
        if clip and clip["name"] != name:
            yield clip
            clip = {}
        clip = clip or {"name": name, "caption": None}
        _add(clip, found, suffix, file, (extension, field))
    if clip:
        yield clip


def _key(name: str) -> tuple[str, str]:
    """The name of a clip, and the extension of its member, from the member's path."""
    folder, slash, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    # A name that is no UTF-8 could not be sent to a reward.
    shown = f"{folder}{slash}{stem}".encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return shown, suffix.lower()


def _add(clip: dict[str, Any], member: Member, suffix: str, file: BinaryIO, caption: tuple[str, str]) -> None:
    if suffix == caption[0]:
        kind = "caption"
    else:
        kinds = {"video": VIDEOS, "image": IMAGES, "embedding": (*EMBEDDINGS, *PICKLES)}
        kind = next((kind for kind, suffixes in kinds.items() if f".{suffix}".endswith(suffixes)), "")
    if not kind:
        return
    if clip.get(kind) is not None:
        clip["problem"] = f"two members are its {kind}: {member.name} is one"
    elif kind == "caption":
        try:
            clip["caption"] = _caption(member, file, caption[1])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            clip["problem"] = f"the caption cannot be read: {member.name}: {error}"
    else:
        clip[kind] = [member.name, member.offset, member.size, member.checksum]


def _caption(member: Member, file: BinaryIO, field: str) -> str:
    if member.size > _MAX_CAPTION_BYTES:
        raise ValueError(f"it has {member.size:,} bytes")
    file.seek(member.offset)
    text = file.read(member.size).decode("utf-8-sig")
    if not field:
        return text
    value = json.loads(text)
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        raise ValueError(  # noqa: TRY004 - of the member, not of an argument
            f"it has no text in the field {field!r}"
        )
    found: str = value[field]
    found.encode()  # JSON can hold half a surrogate pair, which no tokenizer takes
    return found
