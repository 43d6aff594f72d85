"""Opens stores by path or URL, with the credentials that this process's environment has at that moment.

S3 takes `PROD_S3_CHECKPOINT_ACCESS_KEY_ID`, `_SECRET_ACCESS_KEY`, `_ENDPOINT_URL` and `_REGION_NAME` where they are
set, and the usual variables and files of AWS otherwise. They are kept in memory alone: in no recipe, no manifest, no
log and no argument of a command.
"""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from cosmos_core.errors import StorageError

PREFIX: Final = "PROD_S3_CHECKPOINT_"
KEY: Final = f"{PREFIX}ACCESS_KEY_ID"
SECRET: Final = f"{PREFIX}SECRET_ACCESS_KEY"
ENDPOINT: Final = f"{PREFIX}ENDPOINT_URL"
REGION: Final = f"{PREFIX}REGION_NAME"

_S3: Final = ("s3://", "s3a://")
_PLAIN: Final = (OSError, ValueError, ImportError)
_ATTEMPTS: Final = 8
"""Of each request, with pauses that are random up to 1, 2, 4, … 64 seconds: a minute on average."""

_RETRIES: Final = "legacy"
"""botocore's `standard` mode has one quota of repetitions for all requests of a process: with 32 readers and a server
that was away for 5 seconds, 51 of 64 requests failed, and in this mode none."""

_ROUNDS: Final = 2
"""Of those attempts, by s3fs, where a connection breaks or the server says `SlowDown`; two rounds of these for a read
with broken connections. Its own default, 5, makes 200 requests of that. With 1, an answer that breaks off in its middle
would not be read again."""


def is_url(location: str) -> bool:
    """True if a location is a URL, and no path."""
    return "://" in location


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the path in it.

    Requests to S3 are repeated, with growing pauses, where the server is gone, slow or overloaded, up to 8 times, and
    up to 32 where it breaks connections to the last; never where it refuses (`AWS_MAX_ATTEMPTS` and `AWS_RETRY_MODE`
    overrule the 8).

    Raises:
        StorageError: Half of the credentials are set, or `AWS_MAX_ATTEMPTS` is no number of 1 or more.
        ImportError: The URL needs a library that is not installed.
        ValueError: There is no such kind of URL.
    """
    found: tuple[Any, str] = url_to_fs(url, **storage_options(url))
    if url.startswith(_S3):
        found[0].retries = _ROUNDS
    return found


def storage_options(url: str) -> dict[str, Any]:
    """The options of fsspec for a URL; nothing for all but S3. Has secrets in it: keep it nowhere.

    Raises:
        StorageError: As for `file_system`.
    """
    return _s3_options(os.environ) if url.startswith(_S3) else {}


def failures(*besides: type[BaseException]) -> tuple[type[BaseException], ...]:
    """The errors of file systems, botocore's where it is in use (which are no OSErrors), and those that are added."""
    return (*_PLAIN, *_of_botocore(), *besides)


def _of_botocore() -> tuple[type[Exception], ...]:
    botocore = sys.modules.get("botocore.exceptions")
    return () if botocore is None else (botocore.BotoCoreError, botocore.ClientError)


def is_out_of_reach(error: BaseException) -> bool:
    """True if a store could not be asked, or refused to answer, by an error and those it came of."""
    found: BaseException | None = error
    while found is not None:
        is_refusal = isinstance(found, PermissionError) and found.errno is None
        if is_refusal or isinstance(found, (StorageError, ConnectionError, TimeoutError, *_of_botocore())):
            return True
        found = found.__cause__ or found.__context__
    return False


def reason_of(error: BaseException) -> str:
    """The reason why a file system failed, in a line, with what to do where it can be known."""
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    if type(error).__name__ in {"NoCredentialsError", "PartialCredentialsError"}:
        return f"{said}; set {KEY} and {SECRET}, or the variables of AWS"
    if isinstance(error, PermissionError) and error.errno is None:
        return (
            f"{said} (403: refused); the credentials have expired, or do not allow it: renew {KEY} and {SECRET}, or "
            "those of AWS, and start again"
        )
    if isinstance(error, ImportError):
        return f"{said}; for s3:// install cosmos-core[s3]"
    return said


@contextmanager
def told(what: str) -> Iterator[None]:
    """Raise a StorageError that names `what` is done, and where, such as a URL, where the body's store fails."""
    try:
        yield
    except failures() as error:
        raise StorageError(f"{what}: {reason_of(error)}") from error


def _s3_options(environment: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    key, secret = environment.get(KEY), environment.get(SECRET)
    if bool(key) != bool(secret):
        there, lacking = (KEY, SECRET) if key else (SECRET, KEY)
        raise StorageError(f"S3: {there} is set and {lacking} is not; set both, or neither")
    if key and secret:
        options |= {"key": key, "secret": secret}
    if endpoint := environment.get(ENDPOINT):
        options["endpoint_url"] = endpoint
    if region := environment.get(REGION):
        options["client_kwargs"] = {"region_name": region}
    attempts = environment.get("AWS_MAX_ATTEMPTS") or str(_ATTEMPTS)
    if not attempts.isdecimal() or int(attempts) == 0:
        raise StorageError(f"S3: AWS_MAX_ATTEMPTS is {attempts!r}; set a whole number of 1 or more, or unset it")
    # Said here and not left to botocore: fsspec keeps what it opened by its options, and would keep these with it.
    mode = environment.get("AWS_RETRY_MODE") or _RETRIES
    options["config_kwargs"] = {"retries": {"mode": mode, "total_max_attempts": int(attempts)}}
    return options


_TAGS: Final = ("ETag", "etag", "mtime", "created")
"""By which file systems tell one content of a file from another."""


class Place:
    """A folder of a store, there or not.

    Its methods raise what fsspec's file systems do; `told` makes StorageErrors of that.

    Attributes:
        where: The folder as people name it.
    """

    def __init__(self, store: Any, root: str, where: str) -> None:
        self.where: Final = where
        self._store = store
        self._root: Final = root

    def check(self) -> None:
        """Refuse a place that is no folder and cannot be made one: in a store of objects there is none."""

    def listed(self) -> dict[str, tuple[int, str]]:
        """Size, and tag or time, of each file; none if there is no folder."""
        self._store.invalidate_cache()
        return {
            path.removeprefix(f"{self._root}/"): (
                int(said["size"]),
                next((str(said[tag]) for tag in _TAGS if said.get(tag)), ""),
            )
            for path, said in self._store.find(self._root, detail=True).items()
            if path.startswith(f"{self._root}/") and said["type"] == "file" and not path.endswith("/")
        }

    def check_ways(self, names: Iterable[str]) -> None:
        """Refuse to write files that something else than a file is in the way of: in a store of objects nothing is."""

    def read(self, name: str) -> bytes:
        """The content of a file."""
        content: bytes = self._store.cat_file(self._path(name))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Make a file, or replace it."""
        self._store.pipe_file(self._way(name), content)

    def put(self, name: str, file: Path) -> None:
        """Copy a file of this machine.

        Raises:
            StorageError: What is then there is of another size.
        """
        path, sent = self._way(name), file.stat().st_size
        self._store.put_file(str(file), path)
        self._store.invalidate_cache()
        found = self._store.info(path)["size"]
        if found != sent:
            raise StorageError(f"{self.where}: {name} has {found:,} bytes there, and {sent:,} were sent")

    def get(self, name: str, file: Path) -> None:
        """Copy a file to this machine."""
        self._store.get_file(self._path(name), str(file))

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._store.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _way(self, name: str) -> str:
        """The path of a file that can be written there: stores of objects have no folders, others need them."""
        path = self._path(name)
        self._store.makedirs(posixpath.dirname(path), exist_ok=True)
        return path


class LocalPlace(Place):
    """A folder of this machine, where a name may be a link to what belongs to others: nothing is written through it."""

    def __init__(self, root: Path, where: str) -> None:
        self._folder: Final = root.absolute()
        super().__init__(LocalFileSystem(), str(self._folder), where)

    def check(self) -> None:
        """Refuse a place that is no folder and cannot be made one, by a StorageError."""
        for path in (self._folder, *self._folder.parents):
            if path.is_symlink() and not path.exists():
                raise StorageError(f"{path} is a link to what is not there; remove it, or choose another place")
            if path.is_dir():
                return
            if path.exists():
                is_place = path == self._folder
                why = "exists and is no folder" if is_place else "is no folder, so nothing can be made in it"
                raise StorageError(f"{path} {why}; choose another place")

    def listed(self) -> dict[str, tuple[int, str]]:
        """Size and time of each file, of links those of what they lead to.

        A link is a file, whatever it leads to; below a link to a folder nothing is listed.
        """
        return {
            path.relative_to(self._folder).as_posix(): _size_and_time(path)
            for path in sorted(self._folder.rglob("*"))
            if path.is_symlink() or path.is_file()
        }

    def check_ways(self, names: Iterable[str]) -> None:
        """Refuse to write files where something else than a file, or a folder of this place itself, is in the way.

        Raises:
            StorageError: There is a link or a file where a folder is wanted, or a folder where a file is.
        """
        choice = "remove it, or choose another place"
        for name in names:
            for folder in reversed(PurePosixPath(name).parents[:-1]):
                path = self._folder / folder
                if path.is_dir() and path.is_symlink():
                    raise StorageError(f"{path} is a link to another folder; {choice}")
                if path.is_symlink() or (path.exists() and not path.is_dir()):
                    raise StorageError(f"{path} is no folder, and the model has one there; {choice}")
            path = self._folder / name
            if path.is_dir() and not path.is_symlink():
                raise StorageError(f"{path} is a folder, and the model has a file there; {choice}")

    def get(self, name: str, file: Path) -> None:
        """Copy a file of this machine; raises StorageError if it is a link to a folder."""
        path = self._folder / name
        if path.is_dir():
            raise StorageError(f"{path} is a link to a folder, of which nothing is copied; put the folder itself there")
        super().get(name, file)

    def move(self, name: str, file: Path) -> None:
        """Move a file of the same file system there."""
        file.replace(Path(self._way(name)))

    def _way(self, name: str) -> str:
        path = super()._way(name)
        if Path(path).is_symlink():
            Path(path).unlink()
        return path


def opened(url: str) -> Place:
    """The folder at a URL.

    Raises:
        StorageError: Half of the credentials are set (`file_system`, which raises other errors, too).
    """
    store, root = file_system(url)
    root = root.rstrip("/")
    return LocalPlace(Path(root or "/"), url) if isinstance(store, LocalFileSystem) else Place(store, root, url)


def _size_and_time(path: Path) -> tuple[int, str]:
    found = path.stat() if path.exists() else os.lstat(path)
    return found.st_size, str(found.st_mtime)
