"""JSON there and back over HTTP: bounded in time and size, tried again after what may pass, its key told to nobody."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import random
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, PluginError
from cosmos_core.types import JSON

_MOST_BYTES: Final = 1 << 22
_CHUNK: Final = 1 << 16
_SHOWN_CHARACTERS: Final = 200
_MAY_PASS: Final = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_PAUSE_S: Final = 30.0


@attrs.frozen(kw_only=True)
class PostingOptions:
    """Options of whatever is asked over HTTP."""

    url: str = option(help="Address, with `http://` or `https://`.")
    key_variable: str | None = option(
        None,
        help="Environment variable of rollout replicas with the key, sent as `Authorization: Bearer`; absent: none.",
    )
    request_timeout_s: float = option(30.0, help="Seconds until a request is given up.", validator=check.gt(0.0))
    retries: int = option(
        3,
        help="Times that a request is repeated after a lost connection, a timeout or a status of 408, 429 or 5xx.",
        validator=check.ge(0),
    )
    backoff_s: float = option(
        0.5, help="Seconds before the first repetition, doubled before each other one.", validator=check.gt(0.0)
    )
    concurrency: int = option(64, help="Most requests of a worker at a time.", validator=check.ge(1))


class Poster:
    """Posts to one address.

    Args:
        name: Of the reward, for messages.
        options: See there.
        url: The address, if it is another one than the options'.
        repeats_timeouts: Whether what was not answered in time is sent again.

    Raises:
        ConfigError: The address is none.
    """

    def __init__(
        self, name: str, options: PostingOptions, url: str | None = None, *, repeats_timeouts: bool = True
    ) -> None:
        self._name: Final = name
        self._options: Final = options
        self._url: Final = url or options.url
        self._repeats_timeouts: Final = repeats_timeouts
        self._key = ""
        self._free: Final = asyncio.Semaphore(options.concurrency)
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: {options.url!r} is no address; give one such as https://judge.example/v1")
        if parts.username is not None or parts.password is not None:
            raise ConfigError("url: it holds a name or password, which recipes and logs would show; use key_variable")
        if options.key_variable is not None and parts.scheme == "http" and not _is_this_machine(parts.hostname):
            raise ConfigError(
                f"url: {options.url!r} would send the key of {options.key_variable} in the clear; use https"
            )

    def read_key(self) -> None:
        """Take the key from the environment.

        Raises:
            ConfigError: It is not there.
        """
        variable = self._options.key_variable
        if variable is None:
            return
        self._key = os.environ.get(variable, "").strip()
        if not self._key:
            raise ConfigError(f"key_variable: {variable} is not set where this rollout replica runs; set it to the key")

    async def post(self, body: JSON) -> Any:
        """Send a request, again if need be, and return the JSON of the answer.

        Raises:
            PluginError: There is no answer, or it is no JSON.
        """
        async with self._free:
            attempt = 0
            while True:
                try:
                    return await self._once(body)
                except _PassingError as error:
                    if attempt >= self._options.retries:
                        raise self._error(f"{error} ({attempt + 1} attempts)") from None
                    pause_s = self._options.backoff_s * 2**attempt * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
                    attempt += 1
                    await asyncio.sleep(min(_LONGEST_PAUSE_S, max(pause_s, error.pause_s)))

    async def _once(self, body: JSON) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._options.request_timeout_s)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            # Redirects are not followed: the key is for this address alone.
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self._url, json=body, headers=headers, allow_redirects=False) as answer,
            ):
                data = await _read(answer)
        except TimeoutError:
            late = f"no answer within {self._options.request_timeout_s:g} s"
            raise (_PassingError(late) if self._repeats_timeouts else self._error(late)) from None
        except aiohttp.ClientConnectionError as error:
            raise _PassingError(f"no connection ({error})") from None
        except aiohttp.ClientError as error:
            raise self._error(f"no HTTP: {error}") from None
        if answer.status in _MAY_PASS:
            raise _PassingError(f"status {answer.status}: {_shown(data)}", _pause_s(answer))
        if answer.status != 200:
            raise self._error(f"status {answer.status}: {_shown(data)}")
        if len(data) > _MOST_BYTES:
            raise self._error(f"an answer of more than {_MOST_BYTES} bytes")
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._error(f"an answer that is no JSON: {_shown(data)}") from None

    def _error(self, what: str) -> PluginError:
        message = f"reward {self._name}: {self._url}: {what}"
        return PluginError(message.replace(self._key, "***") if self._key else message)


class _PassingError(Exception):
    """What may be otherwise in a moment, or after the pause that the other side asks for."""

    def __init__(self, what: str, pause_s: float = 0.0) -> None:
        super().__init__(what)
        self.pause_s = pause_s


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The body, or its beginning if there is no end of it."""
    data = bytearray()
    while len(data) <= _MOST_BYTES and (part := await answer.content.read(_CHUNK)):
        data += part
    return bytes(data)


def _pause_s(answer: aiohttp.ClientResponse) -> float:
    try:
        return float(answer.headers.get("Retry-After", "0"))
    except ValueError:  # a date
        return 0.0


def _shown(data: bytes) -> str:
    return repr(data[:_SHOWN_CHARACTERS].decode(errors="replace"))


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
