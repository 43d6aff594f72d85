"""A run in place of another one of its name, which has ended, and is removed only once the new one is certain."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cosmos_core.config.loading import load_job
from cosmos_core.errors import ConfigError, CosmosError, UnknownSubmissionError
from cosmos_core.run.files import folder
from cosmos_core.run.files.presence import require_gone


def require_idle(directory: Path) -> None:
    """Refuse to replace a run that goes on; a folder without a run is none.

    Raises:
        ConfigError: It is running now, or its folder cannot be written to.
    """
    if folder.is_run(directory):
        with folder.held(directory):
            require_gone(load_job(directory))


@contextlib.contextmanager
def aside(directory: Path) -> Iterator[Path | None]:
    """Keep the run in a folder, if there is one, beside it until another one has its place for certain.

    A `CosmosError` of the block puts it back in place of what the block has made there; after any other error,
    `UnknownSubmissionError` among them, both stay. Once the block has ended well, the earlier run is removed.

    Yields:
        Where the run is kept; None if there is none.

    Args:
        directory: Where the run is, and the new one will be.

    Raises:
        ConfigError: The run goes on, or could not be moved or removed.
        UnknownSubmissionError: Of the block; it says besides where the earlier run is.
    """
    kept = _moved(directory)
    try:
        yield kept
    except UnknownSubmissionError as error:
        if kept is None:
            raise
        raise UnknownSubmissionError(f"{error}. The run that it replaces is in {kept}") from error
    except CosmosError:
        if kept is not None:
            shutil.rmtree(directory, ignore_errors=True)
            kept.rename(directory)
        raise
    if kept is not None:
        _remove(kept)


def _moved(directory: Path) -> Path | None:
    """Where the run of a folder has been moved to; None if there is none."""
    if not folder.is_run(directory):
        return None
    with folder.held(directory):
        require_gone(load_job(directory))
        try:
            kept = Path(tempfile.mkdtemp(prefix=f"{directory.name}.replaced-", dir=directory.parent))
            directory.rename(kept)
        except OSError as error:
            raise ConfigError(f"{directory}: the run cannot be moved aside: {error}") from error
    return kept


def _remove(kept: Path) -> None:
    try:
        shutil.rmtree(kept)
    except OSError as error:
        raise ConfigError(
            f"{kept}: the run was submitted, and the one that it replaces could not be removed: {error}; remove it"
        ) from error
