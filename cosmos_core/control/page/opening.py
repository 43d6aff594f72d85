"""Opening a run's page, or doing without."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.stages import stages
from cosmos_core.control.page.window import Window
from cosmos_core.errors import TransportError

if TYPE_CHECKING:
    from cosmos_core.control.page.service import Page

_LOG: Final = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Opened:
    """What came of opening a page.

    Attributes:
        window: The controller's side of it; None without a page.
        announcement: What to tell of it, for `controller.json`.
    """

    window: Window | None = None
    announcement: dict[str, str] = attrs.field(factory=dict)


@contextlib.contextmanager
def opened(job: Job) -> Iterator[Opened]:
    """A run's page while its controller serves it; a run goes on without a page that cannot be opened.

    Args:
        job: The run.
    """
    if job.recipe.control.page_port < 0:
        yield Opened()
        return
    try:
        page = _listening(job)
    except TransportError as error:
        _LOG.warning("the run goes on without its page: %s", error)
        yield Opened(announcement={"page_problem": str(error)})
        return
    page.start()
    try:
        _LOG.info("the page is at %s", page.address)
        announcement = {"page": page.address, "page_token": str(page.token_file)}
        yield Opened(window=Window(page.board, stages(job.recipe), job.recipe.run.name), announcement=announcement)
    finally:
        page.close()


def _listening(job: Job) -> Page:
    from cosmos_core.control.page.service import Page  # noqa: PLC0415 - only a controller with a page needs aiohttp

    control = job.recipe.control
    return Page(job.directory, control.page_bind, control.page_port, preferred=_earlier_port(job))


def _earlier_port(job: Job) -> int:
    """Where the controller before this one had the page, so that browsers find it again; 0 if there was none."""
    try:
        found = json.loads((job.directory / "controller.json").read_text(encoding="utf-8"))
        return urlsplit(str(found["page"])).port or 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
