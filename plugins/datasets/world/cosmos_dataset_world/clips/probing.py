"""Looking into videos: how long and how large they are, and whether they are whole. By PyAV."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs

from cosmos_core.data import BadRowError
from cosmos_core.errors import ConfigError
from cosmos_core.storage import cache_folder

How: TypeAlias = Literal["packets", "frames", "never"]

_NUM_THREADS: Final = 8
_FORMAT: Final = 1


@attrs.frozen
class Probed:
    """Size and rate of a video.

    Attributes:
        num_frames: Frames that are in it.
        fps: Frames a second; 0 if it does not say.
        height: In pixels.
        width: In pixels.
    """

    num_frames: int
    fps: float
    height: int
    width: int


class Prober:
    """Looks into videos, once for each file as it is.

    Args:
        how: How closely (see `ClipOptions.check_videos`).
        key_path: Of these options in the recipe, for messages.

    Raises:
        ConfigError: PyAV is not installed.
    """

    def __init__(self, how: How, key_path: str) -> None:
        if how != "never" and importlib.util.find_spec("av") is None:
            raise ConfigError(
                f"{key_path}.check_videos: {how!r} needs PyAV, which is not installed: "
                "pip install 'cosmos-dataset-world[video]', or set it to 'never'"
            )
        self._how: Final = how
        self._known: dict[str, Probed] = {}

    def probe(self, path: Path) -> Probed:
        """Size and rate of a video.

        Raises:
            BadRowError: It cannot be read, or is not whole.
        """
        key = self._key(path)
        return self._known.get(key) or _looked_into(str(path), self._how, key)

    def probe_all(self, paths: Iterable[Path], folder: Path) -> None:
        """Look into many videos at once, and note what they are for other processes and later runs.

        Args:
            paths: Which; those that cannot be read are passed over here.
            folder: By which the notes are found again.
        """
        if self._how == "never":
            return
        notes = _notes(folder)
        known = _noted(notes)
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="probing") as threads:
            found = dict(each for each in threads.map(functools.partial(self._one, known), paths) if each is not None)
        self._known = found
        if found != known:
            _write_notes(notes, found)

    def forget(self) -> None:
        """Keep what was noted in memory no longer."""
        self._known = {}

    def _one(self, known: dict[str, Probed], path: Path) -> tuple[str, Probed] | None:
        with suppress(BadRowError):
            key = self._key(path)
            return key, known.get(key) or _looked_into(str(path), self._how, key)
        return None

    def _key(self, path: Path) -> str:
        """The key of a file in the notes: a file that was changed has another."""
        try:
            stat = path.stat()
        except OSError as error:
            raise BadRowError(f"{path.name} cannot be read: {error.strerror}", "a video cannot be read") from error
        return f"{self._how} {stat.st_size} {stat.st_mtime_ns} {path.name}"


@functools.lru_cache(maxsize=1024)
def _looked_into(path: str, how: How, _key: str) -> Probed:
    import av  # noqa: PLC0415 - an extra

    name = os.path.basename(path)  # noqa: PTH119 - a string is what is cached
    try:
        # A title may be in any encoding.
        with av.open(path, metadata_errors="replace") as container:
            return _contents(container, how, name)
    except av.FFmpegError as error:
        raise BadRowError(f"{name} cannot be read: {_said(error)}", "a video cannot be read") from error


def _contents(container: Any, how: How, name: str) -> Probed:
    stream = next(iter(container.streams.video), None)
    if stream is None:
        raise BadRowError(f"{name} has no video in it", "a video cannot be read")
    stream.codec_context.thread_count = 1
    num_packets, num_decoded, size = 0, 0, (0, 0)
    for packet in container.demux(stream):
        if packet.size and packet.is_corrupt:
            raise BadRowError(f"{name} is cut off in frame {num_packets}", "a video is cut off")
        num_packets += packet.size > 0
        if how == "frames" or not num_decoded:
            for frame in packet.decode():
                num_decoded += 1
                size = (frame.height, frame.width)
    if not num_decoded:
        raise BadRowError(f"{name} has no frame", "a video cannot be read")
    num_frames = num_decoded if how == "frames" else num_packets
    if stream.frames > num_packets:
        raise BadRowError(
            f"{name} is cut off: it says that it has {stream.frames} frames, and has {num_packets}",
            "a video is cut off",
        )
    rate = stream.average_rate or stream.guessed_rate
    return Probed(num_frames, float(rate) if rate else 0.0, *size)


def _said(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).strip()


def _notes(folder: Path) -> Path:
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:24]
    return cache_folder() / "world" / "probes" / f"{digest}.json"


def _noted(notes: Path) -> dict[str, Probed]:
    """The notes; nothing if the notes cannot be read, as all can be found again."""
    try:
        said = json.loads(notes.read_bytes())
        if said["format"] != _FORMAT:
            return {}
        return {key: Probed(int(n), float(fps), int(h), int(w)) for key, (n, fps, h, w) in said["videos"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write_notes(notes: Path, found: dict[str, Probed]) -> None:
    partial = notes.with_name(f".{secrets.token_hex(6)}.partial")
    said = {"format": _FORMAT, "videos": {key: attrs.astuple(each) for key, each in found.items()}}
    # A cache that cannot be written costs time, and nothing else.
    with suppress(OSError):
        notes.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(said))
        partial.rename(notes)
