"""Opens stores by path or URL, with the credentials that this process's environment has at that moment.

S3 takes `PROD_S3_CHECKPOINT_ACCESS_KEY_ID`, `_SECRET_ACCESS_KEY`, `_ENDPOINT_URL` and `_REGION_NAME` where they are
set, and the usual variables and files of AWS otherwise. They are kept in memory alone: in no recipe, no manifest, no
log and no argument of a command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from fsspec.core import url_to_fs

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
    """Whether a location is a URL, and no path."""
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
    """What fsspec needs to know besides a URL; nothing for all but S3. Has secrets in it: keep it nowhere.

    Raises:
        StorageError: As for `file_system`.
    """
    return _s3_options(os.environ) if url.startswith(_S3) else {}


def failures(*besides: type[BaseException]) -> tuple[type[BaseException], ...]:
    """What file systems raise, and what else is asked for; botocore's errors, where it is in use, are no OSErrors."""
    return (*_PLAIN, *_of_botocore(), *besides)


def _of_botocore() -> tuple[type[Exception], ...]:
    botocore = sys.modules.get("botocore.exceptions")
    return () if botocore is None else (botocore.BotoCoreError, botocore.ClientError)


def is_out_of_reach(error: BaseException) -> bool:
    """Whether a store could not be asked, or refused to answer, by an error and those it came of."""
    found: BaseException | None = error
    while found is not None:
        is_refusal = isinstance(found, PermissionError) and found.errno is None
        if is_refusal or isinstance(found, (StorageError, ConnectionError, TimeoutError, *_of_botocore())):
            return True
        found = found.__cause__ or found.__context__
    return False


def reason_of(error: BaseException) -> str:
    """Why a file system failed, in a line, with what to do where it can be known."""
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
    """Name what a body fails with.

    Args:
        what: What is done, and where, such as a URL.

    Raises:
        StorageError: The store fails.
    """
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
    # Said here and not left to botocore: fsspec keeps what it opened by its options, and would keep these with it.
    options["config_kwargs"] = {
        "retries": {"mode": environment.get("AWS_RETRY_MODE") or _RETRIES, "total_max_attempts": _attempts(environment)}
    }
    return options


def _attempts(environment: Mapping[str, str]) -> int:
    said = environment.get("AWS_MAX_ATTEMPTS") or str(_ATTEMPTS)
    if not said.isdecimal() or int(said) == 0:
        raise StorageError(f"S3: AWS_MAX_ATTEMPTS is {said!r}; set a whole number of 1 or more, or unset it")
    return int(said)
