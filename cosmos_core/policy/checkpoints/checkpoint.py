"""The folder of a run's checkpoints: which are complete, which is the newest, which to keep. Imports no torch.

A checkpoint is the folder `step-N` with a file `complete.json`, which is written last; anything without it is as good
as absent. It says how long each of the other files is, and the checksum of `.metadata`, which has those of all tensors.
The folder may be a path or any fsspec URL.
"""

from __future__ import annotations

import json
import posixpath
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import attrs

from cosmos_core.config.checks import superseded
from cosmos_core.config.problems import show
from cosmos_core.config.schema import NOT_NEGATIVE
from cosmos_core.config.structure import structure, with_checksum, without_checksum
from cosmos_core.errors import CheckpointError, ConfigError, DamagedCheckpointError, StorageError
from cosmos_core.storage import failures, file_system, is_out_of_reach, reason_of

T = TypeVar("T")

COMPLETE: Final = "complete.json"
METADATA: Final = ".metadata"
BEST: Final = "best.json"
FORMAT: Final = 1

_STEP: Final = re.compile(r"step-(\d+)")


@attrs.frozen(kw_only=True)
class Contents:
    """The files of a checkpoint beside `complete.json`.

    Attributes:
        sizes: Bytes of each, by name.
        metadata: CRC-32 of `.metadata`.
    """

    sizes: Mapping[str, int]
    metadata: int


@attrs.frozen(kw_only=True)
class Place:
    """A checkpoint's place in the run.

    Attributes:
        run_id: The run that made it.
        step: Global step whose weights it holds.
        stage: Index of the stage whose optimizer it holds.
        nonfinite_steps: Steps skipped in a row before it.
        below: Digest of the frozen weights that its adapters are for; empty if it has none, or is of a release that
            did not note it.
        unimitated_steps: Steps in a row before it that lacked every demonstration to imitate beside rollouts; 0 in
            one of a release that did not note it.
        generation: Of the gradient group that made it; later ones are of what the run went on to.
        contents: Its files; None in one of a release that did not note them, of which nothing can be verified.
    """

    run_id: str
    step: int = attrs.field(validator=NOT_NEGATIVE)
    stage: int = attrs.field(validator=NOT_NEGATIVE)
    nonfinite_steps: int = attrs.field(validator=NOT_NEGATIVE)
    below: str = ""
    unimitated_steps: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    generation: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    contents: Contents | None = None

    def is_genuine(self, generation: int) -> bool:
        """True if it is of what the run came to, where that gradient group did the step.

        A step that was undone comes again with other weights, and what an earlier group saved of it may still be there.
        A checkpoint that does not say which group made it is believed.
        """
        return not self.generation or self.generation >= generation


@attrs.frozen(kw_only=True)
class _Note:
    """The note of the best checkpoint."""

    step: int = attrs.field(validator=NOT_NEGATIVE)


def path_of(url: str, step: int) -> str:
    """The path of a step's checkpoint."""
    return f"{url.rstrip('/')}/step-{step}"


def completed(url: str) -> list[int]:
    """Steps of the complete checkpoints, oldest first; none if the folder does not exist.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    with _access(url) as (files, root):
        if not files.isdir(root):
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False))
        steps = (int(match[1]) for name in names if (match := _STEP.fullmatch(name)))
        return sorted(step for step in steps if files.exists(f"{root}/step-{step}/{COMPLETE}"))


def read_place(path: str) -> Place:
    """Read a checkpoint's place in the run.

    Raises:
        CheckpointError: It is of another format, or cannot be reached.
        DamagedCheckpointError: It is absent, incomplete, or says what cannot be: the file, the field and its value are
            named.
    """
    with _access(path) as (files, root):
        try:
            said = _decoded(files.cat_file(f"{root}/{COMPLETE}"), f"{path}/{COMPLETE}")
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path} is no complete checkpoint: it has no {COMPLETE}") from None
    form = said.pop("format", None)
    if form != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {form!r}, this release reads {FORMAT}")
    place = _structured(said, Place, f"{path}/{COMPLETE}")
    folder = _STEP.fullmatch(path.rstrip("/").rpartition("/")[2])
    if folder is not None and int(folder[1]) != place.step:
        raise DamagedCheckpointError(
            f"{path}/{COMPLETE}.step: {place.step}, in a folder of step {folder[1]}; restore either"
        )
    return place


def marker(place: Place, path: str | None = None) -> bytes:
    """The content of `complete.json`, with the files that have been written of the checkpoint at a path.

    Raises:
        CheckpointError: The path cannot be read.
    """
    if path is not None:
        with _access(path) as (files, root):
            metadata = zlib.crc32(files.cat_file(f"{root}/{METADATA}"))
            place = attrs.evolve(place, contents=Contents(sizes=_sizes(files, root), metadata=metadata))
    return json.dumps(with_checksum({"format": FORMAT, **attrs.asdict(place)})).encode()


def require_whole(path: str) -> Place:
    """Check that the files of a checkpoint are there, each as long as it was written; its place in the run.

    Raises:
        CheckpointError: As of `read_place`.
        DamagedCheckpointError: As of `read_place`; or a file is missing, or has another length.
    """
    place = read_place(path)
    with _access(path) as (files, root):
        found = _sizes(files, root)
    for name, size in place.contents.sizes.items() if place.contents is not None else ():
        if name not in found:
            raise DamagedCheckpointError(f"{path} is damaged: {name}, of {size:,} bytes, is missing")
        if found[name] != size:
            raise DamagedCheckpointError(
                f"{path} is damaged: {name} has {found[name]:,} bytes, and {size:,} were written"
            )
    return place


def mark_best(url: str, step: int) -> None:
    """Note the checkpoint to keep besides the newest.

    Raises:
        CheckpointError: The note cannot be written.
    """
    with _access(url) as (files, root):
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root}/{BEST}", json.dumps({"step": step}).encode())


def best(url: str) -> int | None:
    """Step of the checkpoint that was marked; None if none was.

    Raises:
        CheckpointError: The folder cannot be read, or the note says what cannot be.
    """
    with _access(url) as (files, root):
        try:
            said = _decoded(files.cat_file(f"{root}/{BEST}"), f"{url}/{BEST}")
        except (FileNotFoundError, NotADirectoryError):
            return None
    return _structured(said, _Note, f"{url}/{BEST}").step


def check_writable(url: str) -> None:
    """Write and remove a file where checkpoints will be.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    with _access(url) as (files, root):
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root}/.writable", b"")
        files.rm_file(f"{root}/.writable")


def prune(url: str, keep: int, *, newest: int | None = None) -> list[int]:
    """Remove all but the `keep` newest complete checkpoints and the best one; the steps removed.

    Args:
        url: The folder.
        keep: How many to keep.
        newest: Where the run stands; checkpoints of later steps, which it has gone back from, are neither counted nor
            removed.

    Raises:
        CheckpointError: The folder cannot be read or written.
    """
    counted = [step for step in completed(url) if newest is None or step <= newest]
    return _removed(url, superseded(counted, keep, best(url)))


def drop_undone(url: str, step: int, generation: int) -> list[int]:
    """Remove complete checkpoints of steps that were undone, which will come again with other weights.

    Args:
        url: The folder.
        step: The step that the run goes on from.
        generation: Of the gradient group that does; what a later one made stays, as then this one is long over.

    Returns:
        The steps removed.

    Raises:
        CheckpointError: The folder cannot be read or written.
    """
    later = [found for found in completed(url) if found > step]
    return _removed(url, [found for found in later if _is_of_before(path_of(url, found), generation)])


def _is_of_before(path: str, generation: int) -> bool:
    try:
        return read_place(path).generation < generation
    except DamagedCheckpointError:
        # Nobody can go on from it, whoever made it.
        return True


def _removed(url: str, steps: list[int]) -> list[int]:
    with _access(url) as (files, root):
        for step in steps:
            # Without its marker it is no checkpoint, so an interrupted removal leaves nothing half valid.
            files.rm_file(f"{root}/step-{step}/{COMPLETE}")
            files.rm(f"{root}/step-{step}", recursive=True)
    return steps


def _decoded(content: bytes, file: str) -> dict[str, Any]:
    try:
        said = json.loads(content)
    except ValueError as error:
        raise DamagedCheckpointError(f"{file} is damaged: {error}") from error
    if not isinstance(said, dict):
        raise DamagedCheckpointError(f"{file} is damaged: it holds {show(said)} instead of an object")
    try:
        own: dict[str, Any] = without_checksum(said, file)
    except ConfigError as error:
        raise DamagedCheckpointError(str(error)) from error
    return own


def _structured(said: Mapping[str, Any], cls: type[T], file: str) -> T:
    try:
        return structure(said, cls, file)
    except ConfigError as error:
        raise DamagedCheckpointError(str(error)) from error


def _sizes(files: Any, root: str) -> dict[str, int]:
    """Bytes of each file of a checkpoint but `complete.json`, by name."""
    listed = [each for each in files.ls(root, detail=True) if each["type"] == "file"]
    found = {posixpath.basename(each["name"]): each["size"] for each in listed}
    return {name: size for name, size in sorted(found.items()) if name != COMPLETE}


@contextmanager
def _access(url: str) -> Iterator[tuple[Any, str]]:
    try:
        files, root = file_system(url)
        files.invalidate_cache()
        yield files, root.rstrip("/")
    except failures(StorageError) as error:
        where = f"{url} is out of reach" if is_out_of_reach(error) else f"checkpoints at {url}"
        raise CheckpointError(f"{where}: {reason_of(error)}") from error
