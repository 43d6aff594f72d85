"""The folder of a run: made once, complete or not at all; locked by a session; replaced once a new run is certain."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.loading import dump_recipe, load_job, save_job
from cosmos_core.config.schema import Recipe
from cosmos_core.config.sources import copied
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.errors import ConfigError
from cosmos_core.files import replace_file
from cosmos_core.run.address import require_gone

SUMMARY: Final = "summary.json"
REPORT: Final = "report.html"
_MARK: Final = "job.json"
_LOCK: Final = ".session.lock"
_LOOK_S: Final = 0.05
"""In which one who looks whether a session has the run (`is_held`) is done."""
_LOG: Final = logging.getLogger(__name__)


def is_run(directory: Path) -> bool:
    """True if a folder is a run's."""
    return (directory / _MARK).is_file()


def check_unused(directory: Path, *, overwrite: bool) -> None:
    """Check that nothing is at `directory` that a run may not replace, such as one that goes on; or a ConfigError."""
    if directory.exists() and any(directory.iterdir() if directory.is_dir() else [directory]):
        if not is_run(directory):
            raise ConfigError(f"run.name: {directory} exists and is not the folder of a run; choose another --name")
        if not overwrite:
            raise ConfigError(
                f"run.name: the run {directory} exists; go on with it: cosmos run --resume {directory}, "
                "replace it: --overwrite, or choose another --name"
            )
        with held(directory):
            require_gone(load_job(directory))


def check_free(directory: Path, *, overwrite: bool) -> None:
    """Check that a run may be made at `directory`, by trying to write there; raises ConfigError if not."""
    check_unused(directory, overwrite=overwrite)
    parent = directory
    while not parent.exists():
        parent = parent.parent
    try:
        # Tried: the bits of a folder do not tell whether its file system takes any.
        with tempfile.TemporaryDirectory(prefix=".cosmos-", dir=parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.output_dir: {parent} cannot be written to: {error.strerror}; choose another folder"
        ) from error


def create(job: Job, assets: Path, manifest: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the run's folder, `job.directory`: job, resolved recipe, manifest and assets (a folder that may not exist).

    A run that is there is replaced if `overwrite`; see `check_free`.
    """
    check_free(job.directory, overwrite=overwrite)
    try:
        if overwrite and job.directory.exists():
            shutil.rmtree(job.directory)
        # One session makes it; another that has come this far finds it there.
        job.logs.mkdir(parents=True)
        try:
            if assets.is_dir():
                shutil.copytree(assets, job.assets)
            write_json(job.directory / "manifest.json", manifest)
            save(job)
        except BaseException:
            shutil.rmtree(job.directory, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"run.output_dir: {job.directory} could not be made: {error}; choose another --name or folder"
        ) from error


def save(job: Job) -> Job:
    """Write the job, its recipe and new files of plugins into the run's folder; the job with the copies of these.

    A ConfigError says what could not be read or written.
    """
    recipe, sources = copied(unstructure(job.recipe), job.directory)
    job = attrs.evolve(job, recipe=structure(recipe, Recipe))
    texts = {job.directory / "recipe.resolved.toml": dump_recipe(job.recipe, job.directory).encode()}
    for path, content in (sources | texts).items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    save_job(job)
    return job


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other sessions of a run out while this one lasts; the lock ends with the process, however that ends.

    A ConfigError says if it is no run, another session has it, or it cannot be written to.
    """
    if not is_run(directory):
        raise ConfigError(f"{directory}: not the folder of a run (it has no {_MARK})")
    try:
        file = (directory / _LOCK).open("wb")
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written to: {error.strerror}") from error
    with file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_S)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{directory} is running now, in another session; stop it first") from None
        except OSError as error:
            # Some network file systems have no locks; the journal still takes one writer only.
            _LOG.debug("%s cannot be locked: %s", directory, error)
        yield


def is_held(directory: Path) -> bool:
    """True if a session has the run; taken for so on a file system without locks."""
    try:
        with (directory / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def write_json(path: Path, data: Any) -> None:
    """Write JSON; readers see the old file or the new one, never a part; raises OSError if it could not be written."""
    replace_file(path, f"{json.dumps(data, indent=2, ensure_ascii=False)}\n".encode())


@attrs.frozen(kw_only=True)
class Ended:
    """The end of a session, as its summary says.

    Attributes:
        wall_s: Seconds of all sessions.
        reason: Why, if there is more to say.
    """

    outcome: str
    steps: int
    wall_s: float
    reason: str = ""


def read_summary(directory: Path) -> Ended | None:
    """The end of a run's last session; None if it has not ended (yet); a ConfigError if it is damaged."""
    path = directory / SUMMARY
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path}: damaged: {error}; remove it") from error
    known = [field.name for field in attrs.fields(Ended)]
    said = {name: found[name] for name in known if name in found} if isinstance(found, dict) else found
    return structure(said, Ended, str(path))
