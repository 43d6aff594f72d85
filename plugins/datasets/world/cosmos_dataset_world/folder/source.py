"""A folder of clips as a source of rows: the names of its files, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config import option
from cosmos_core.data import BadRowError, RawRow
from cosmos_core.errors import DataError
from cosmos_dataset_world.clips import Clip, ClipOptions, Part
from cosmos_dataset_world.clips.clip import EMBEDDINGS, IMAGES, PICKLES, VIDEOS
from cosmos_dataset_world.clips.probing import Prober

CAPTIONS: Final = "metas"
_MAX_CAPTION_BYTES: Final = 1 << 20


@attrs.frozen(kw_only=True)
class FolderOptions(ClipOptions):
    """The folders of clips, and the names within them."""

    train: str = option(
        help="Folder of the train clips: `metas/NAME.txt`, `videos/NAME.mp4`, and `images/NAME.png` for images that "
        "are given. `${NAME}` and `${NAME:-default}` stand for environment variables; a relative path starts at the "
        "recipe."
    )
    heldout: str | None = option(None, help="Folder of the held-out clips.")
    embeddings_folder: str = option(
        "text_embedding", help="Where embeddings are, `NAME.safetensors`, within the folder of the clips."
    )

    def __attrs_post_init__(self) -> None:
        ClipOptions.__attrs_post_init__(self)
        if self.heldout is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")


class ClipFolder:
    """The clips of a folder: every name that a caption or a video has.

    Args:
        folder: Has `metas` and, where videos are needed, `videos`.
        options: What a row needs.
        prober: Looks into the videos when all rows are checked.

    Raises:
        DataError: A folder is missing or cannot be read.
    """

    def __init__(self, folder: Path, options: FolderOptions, prober: Prober) -> None:
        self._folder: Final = folder
        self._prober: Final = prober
        self._kinds: Final[Mapping[str, tuple[str, ...]]] = {
            CAPTIONS: (".txt",),
            **({"videos": VIDEOS} if options.needs_video else {}),
            **({"images": IMAGES} if options.given == "image" else {}),
        }
        self._embeddings: Final = None if options.embeddings == "ignored" else options.embeddings_folder
        listed = {kind: _listed(folder / kind) for kind in self._kinds}
        stems = [Path(name).stem for kind, names in listed.items() if kind != "images" for name in names]
        self._names: Final = sorted(set(stems))

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._folder

    def scan(self) -> Iterator[RawRow]:
        """Every clip once, in the order of their names.

        Raises:
            DataError: The folder cannot be read.
        """
        if "videos" in self._kinds:
            videos = self._folder / "videos"
            self._prober.probe_all((videos / name for name in _listed(videos) if name.endswith(VIDEOS)), videos)
        try:
            for number in self.places():
                try:
                    yield RawRow(locator=number, line=number + 1, row=self.read(number))
                except BadRowError as error:
                    yield RawRow(locator=number, line=number + 1, row=None, problem=f"{error.kind}: {error}")
        finally:
            self._prober.forget()

    def places(self) -> Iterator[int]:
        """The number of every clip."""
        return iter(range(len(self._names)))

    def read(self, locator: int) -> Clip:
        """One clip again.

        Raises:
            BadRowError: Its files are of another kind, too many, or cannot be read.
        """
        name = self._names[locator]
        if not name.isprintable():
            raise BadRowError(f"{name!r} is no name that can be shown; rename the files", "a name that cannot be shown")
        parts = {kind: self._part(kind, name, suffixes) for kind, suffixes in self._kinds.items()}
        caption = parts[CAPTIONS]
        return Clip(
            name=name,
            caption=None if caption is None else _text(caption),
            caption_name=f"{CAPTIONS}/{name}.txt",
            video=parts.get("videos"),
            image=parts.get("images"),
            embedding=None if self._embeddings is None else self._embedding(name),
        )

    def _part(self, kind: str, name: str, suffixes: tuple[str, ...]) -> Part | None:
        found = [part for suffix in suffixes if (part := _part(self._folder, kind, name + suffix)) is not None]
        if len(found) > 1:
            names = " and ".join(part.name for part in found)
            raise BadRowError(f"{names} are of one name, and one is wanted", "two files of one name")
        return found[0] if found else None

    def _embedding(self, name: str) -> Part | None:
        """The safetensors file, or else a pickle of the name."""
        assert self._embeddings is not None
        parts = (_part(self._folder, self._embeddings, name + suffix) for suffix in (*EMBEDDINGS, *PICKLES))
        return next((part for part in parts if part is not None), None)


def _part(folder: Path, kind: str, name: str) -> Part | None:
    path = folder / kind / name
    try:
        return Part(name=f"{kind}/{name}", size_bytes=path.stat().st_size, path=path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadRowError(f"{kind}/{name} cannot be read: {error.strerror}", "a file cannot be read") from error


def _text(part: Part) -> str:
    assert part.path is not None
    if part.size_bytes > _MAX_CAPTION_BYTES:
        raise BadRowError(f"{part.name} has {part.size_bytes:,} bytes, too many for a caption", "a caption is too long")
    try:
        return part.path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRowError(f"{part.name} cannot be read as UTF-8: {error}", "a caption cannot be read") from error


def _listed(folder: Path) -> list[str]:
    """Names of the files in a folder, in order; hidden ones are none."""
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"{folder}: {error.strerror}; a folder of clips has metas/NAME.txt and videos/NAME.mp4"
        ) from error
