"""Routes of the page for samples and media. Nothing is read before somebody asks; a thread reads, for one at a time."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
from collections.abc import Awaitable, Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from aiohttp import web

from cosmos_core.errors import ConfigError
from cosmos_core.observe.samples import SampleBrowser, encoded
from cosmos_core.threads import begin

_MOST_WAITING: Final = 8
_MEDIA: Final = r"/{place:media/step-[0-9]{1,12}/row-[0-9]{1,12}(?:\.strip\.webp|\.webp|\.png|\.mp4)}"
"""A held-out sample, or some of its frames."""
_TYPES: Final = {
    **{f".{name}": f"image/{name}" for name in ("bmp", "gif", "jpeg", "png", "webp")},
    ".jpg": "image/jpeg",
    **{f".{name}": f"video/{name}" for name in ("mp4", "webm")},
}
_DATA: Final = re.compile(f"data:({'|'.join({*_TYPES.values()})});base64,(.*)", re.DOTALL)
_BEGINNING: Final = re.compile(rb"BM|GIF8|\xff\xd8\xff|\x89PNG|RIFF....WEBP|....ftyp|\x1aE\xdf\xa3", re.DOTALL)
"""The first bytes of these types."""
_CHUNK_BYTES: Final = 1 << 16
WRITE_S: Final = 10.0
"""How long a browser may take to read what was sent, before it is let go."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _Query(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    order: Literal["newest", "worst", "best"] = "newest"
    first: _Number = 0
    text: Annotated[str, msgspec.Meta(max_length=200)] = ""
    step: _Number | None = None
    purpose: str | None = None
    status: str | None = None
    row: _Number | None = None


class SampleRoutes:
    """Serves what `SampleBrowser` tells of the run in a folder, and images and videos that its samples name."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._browser: Final = SampleBrowser(directory)
        self._turn: Final = asyncio.Lock()
        self._num_waiting = 0

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        lease = "/api/samples/{lease:[0-9]{1,15}}"
        router.add_get("/api/samples", self._on_groups)
        router.add_get(lease, partial(self._on_one, self._browser.group))
        router.add_get(lease + "/tokens/{index:[0-9]{1,9}}", partial(self._on_one, self._browser.tokens))
        router.add_get(lease + "/given/{number:[0-9]{1,9}}", self._on_given, allow_head=False)
        router.add_get(_MEDIA, self._on_media, allow_head=False)

    async def _on_groups(self, request: web.Request) -> web.Response:
        try:
            query = msgspec.to_builtins(msgspec.convert(dict(request.query), _Query, strict=False))
            return _told(await self._read(partial(self._browser.groups, **query)))
        except (msgspec.ValidationError, ConfigError) as error:
            return refused(422, f"not a question for samples: {error}")

    async def _on_one(self, read: Callable[..., dict[str, Any]], request: web.Request) -> web.Response:
        try:
            return _told(await self._read(partial(read, *map(int, request.match_info.values()))))
        except ConfigError as error:
            return refused(404, str(error))

    async def _on_given(self, request: web.Request) -> web.StreamResponse:
        """An image or video of a prompt: a file that the dataset names, or what is in a `data:` URL."""
        try:
            place = await self._read(partial(self._browser.given, *map(int, request.match_info.values())))
            if (inside := _DATA.fullmatch(place)) is not None:
                return web.Response(body=base64.b64decode(inside[2], validate=True), content_type=inside[1])
        except (ConfigError, ValueError) as error:
            return refused(404, str(error))
        return await _sent(request, Path(place), place)

    async def _on_media(self, request: web.Request) -> web.StreamResponse:
        place = request.match_info["place"]
        return await _sent(request, self._directory / place, place)

    async def _read(self, read: Callable[[], Any]) -> Any:
        if self._num_waiting >= _MOST_WAITING:
            raise web.HTTPServiceUnavailable(reason=f"{_MOST_WAITING} others wait for samples; try again")
        self._num_waiting += 1
        try:
            async with self._turn:
                return await _aside(read)
        finally:
            self._num_waiting -= 1


def refused(status: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    """An answer that says why there is no other."""
    more = {name: value for name, value in (headers or {}).items() if value}
    if status == web.HTTPUnauthorized.status_code:
        more["WWW-Authenticate"] = "Bearer"
    return web.json_response({"refused": reason}, status=status, headers=more)


def _told(found: object) -> web.Response:
    return web.Response(body=encoded(found), content_type="application/json")


def _aside(call: Callable[[], Any]) -> Awaitable[Any]:
    """Call on a thread that the controller's end does not wait for, as it does for those of asyncio."""
    return asyncio.wrap_future(begin(call, "samples"))


def _opened(path: Path) -> tuple[FileIO, str, int]:
    """An image or video, which a browser may show, with its type and size; a ValueError or OSError of anything else."""
    path = path.resolve(strict=True)  # the name of a link says nothing of its file
    if (media_type := _TYPES.get(path.suffix.lower())) is not None and path.is_file():
        file = path.open("rb", buffering=0)
        if _BEGINNING.match(os.pread(file.fileno(), 16, 0)) is not None:
            return file, media_type, os.fstat(file.fileno()).st_size
        file.close()
    raise ValueError(path)


async def _sent(request: web.Request, path: Path, shown: str) -> web.StreamResponse:
    """Send an image or video in chunks, as they are read; no other file is given out, whatever a sample names."""
    try:
        file, media_type, left = await _aside(partial(_opened, path))
    except (OSError, RuntimeError, ValueError):
        return refused(404, f"{shown:.200}: no image or video that is here")
    response = web.StreamResponse(headers={"Content-Type": media_type, "Content-Length": str(left)})
    with file:
        if (transport := request.transport) is None:
            return response  # who asked has left
        transport.set_write_buffer_limits(0)  # what was written has left this process
        with contextlib.suppress(OSError):
            await response.prepare(request)
            while left > 0 and (chunk := await _aside(partial(file.read, _CHUNK_BYTES))):
                await asyncio.wait_for(response.write(chunk), WRITE_S)
                left -= len(chunk)
    if left > 0:
        transport.abort()  # else the next answer would be taken for the rest
    return response
