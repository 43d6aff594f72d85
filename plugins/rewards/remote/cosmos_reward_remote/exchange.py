"""Requests over HTTP: bounded in time and size, tried again after what may pass, their secret told to nobody."""

from __future__ import annotations

import asyncio
import io
import ipaddress
import json
import random
import socket
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import aiohttp
import attrs

from cosmos_core.errors import ConfigError, PluginError

_MOST_BYTES: Final = 1 << 22
_CHUNK: Final = 1 << 16
_SHOWN_CHARACTERS: Final = 200
_LOOKED_AT: Final = 1 << 14
_CONNECT_S: Final = 3.0
_REMEDY: Final = "start the service, or correct the address"
_MAY_PASS: Final = frozenset({408, 429, 500, 502, 503, 504})
_MAY_SAY_WHEN: Final = frozenset({429, 503})
_MOST_DOUBLINGS: Final = 30


@attrs.frozen(kw_only=True)
class Answer:
    """The other side's answer: a status that does not pass by itself, and a body of at most 4 MiB."""

    status: int
    data: bytes
    secret: str = attrs.field(default="", repr=False)

    @property
    def shown(self) -> str:
        """The beginning of the body, for messages; of an error in JSON, what it says."""
        try:
            said = json.loads(self.data)["error"]
        except (ValueError, LookupError, TypeError, RecursionError):
            said = None
        if isinstance(said, str) and said.isprintable() and said:
            return self._masked(said)[:_SHOWN_CHARACTERS]
        return repr(self._masked(self.data[:_LOOKED_AT].decode(errors="replace"))[:_SHOWN_CHARACTERS])

    def _masked(self, text: str) -> str:
        """Before it is cut: the beginning of a secret would tell some of it."""
        return text.replace(self.secret, "***") if self.secret else text


@attrs.frozen(kw_only=True)
class Patience:
    """Timeouts, retries and pauses of a request.

    Attributes:
        request_timeout_s: Seconds until a request is given up.
        retries: Times that one is repeated; None: until whoever asks gives up.
        backoff_s: Seconds before the first repetition, doubled before each other one.
        longest_pause_s: Most seconds before one, whatever the other side asks for.
        repeats_timeouts: Whether what was not answered in time is sent again.
        passing: Statuses that may be others in a moment.
        patience_s: Seconds for which a status of 429 or 503 that says when to come again (`Retry-After`) is repeated
            without counting; 0 if it counts as any other.
    """

    request_timeout_s: float
    retries: int | None
    backoff_s: float
    longest_pause_s: float = 30.0
    repeats_timeouts: bool = True
    passing: frozenset[int] = _MAY_PASS
    patience_s: float = 0.0


class RefusedError(PluginError):
    """The other side answered with a status that does not pass.

    Attributes:
        status: The status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Exchange:
    """Sends requests.

    Args:
        name: Of the reward, for messages.
        patience: How long, and how often.

    Attributes:
        failure: Why the last request has had no answer yet; empty if it has one. Of requests one after the other.
    """

    def __init__(self, name: str, patience: Patience) -> None:
        self.failure = ""
        self._name: Final = name
        self._patience: Final = patience
        self._secret = ""

    def bear(self, secret: str) -> None:
        """Send this with every request from now on, and keep it out of messages."""
        self._secret = secret

    async def send(self, method: str, url: str, *, headers: Mapping[str, str] | None = None, **body: Any) -> Answer:
        """Send a request, again if need be.

        Raises:
            PluginError: There is no answer, only statuses that may pass, or no end of the answer.
        """
        patience, attempt = self._patience, 0
        until = time.monotonic() + patience.patience_s
        while True:
            try:
                answer = await self._once(method, url, headers or {}, body)
            except _PassingError as error:
                self.failure = str(error)
                is_counted = not (patience.patience_s and error.is_awaited)
                if is_counted and patience.retries is not None and attempt >= patience.retries:
                    raise self.error(url, f"{error} ({attempt + 1} attempts)") from None
                doublings = min(attempt, _MOST_DOUBLINGS)
                pause_s = patience.backoff_s * 2**doublings * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
                pause_s = min(patience.longest_pause_s, max(pause_s, error.pause_s))
                if not is_counted and time.monotonic() + pause_s >= until:
                    raise self.error(url, f"{error} (for {patience.patience_s:g} s)") from None
                attempt += is_counted
                await asyncio.sleep(pause_s)
            else:
                self.failure = ""
                return answer

    def late(self, url: str, what: str) -> PluginError:
        """An error that there was no time left, with what the last request failed with."""
        return self.error(url, f"{what} (last: {self.failure})" if self.failure else what)

    def error(self, url: str, what: str) -> PluginError:
        """An error that does not tell the secret."""
        return PluginError(self._told(url, what))

    def refusal(self, url: str, answer: Answer) -> RefusedError:
        """An error that tells the status of an answer, and not the secret."""
        return RefusedError(self._told(url, f"status {answer.status}: {answer.shown}"), answer.status)

    def _told(self, url: str, what: str) -> str:
        message = f"reward {self._name}: {url}: {what}"
        return message.replace(self._secret, "***") if self._secret else message

    async def _once(self, method: str, url: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Answer:
        patience = self._patience
        timeout = aiohttp.ClientTimeout(total=patience.request_timeout_s)
        if isinstance(body.get("data"), bytes):
            # Sent in parts: in one piece, a video would keep the event loop from all else.
            body = {**body, "data": io.BytesIO(body["data"])}
        sent = {**headers, "Authorization": f"Bearer {self._secret}"} if self._secret else dict(headers)
        try:
            # Redirects are not followed: the secret is for this address alone.
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, url, headers=sent, allow_redirects=False, **body) as answer,
            ):
                data = await _read(answer)
        except TimeoutError:
            late = f"no answer within {patience.request_timeout_s:g} s"
            if patience.repeats_timeouts:
                raise _PassingError(late) from None
            raise self.error(url, late) from None
        except aiohttp.ClientConnectorError as error:
            what = error.os_error.strerror or error.os_error
            raise _PassingError(f"no connection ({what}); {_REMEDY}") from None
        except aiohttp.ClientConnectionError as error:
            raise _PassingError(f"no connection ({error}); {_REMEDY}") from None
        except aiohttp.ClientError as error:
            raise self.error(url, f"no HTTP: {error}") from None
        found = Answer(status=answer.status, data=data, secret=self._secret)
        if answer.status in patience.passing:
            is_awaited = answer.status in _MAY_SAY_WHEN and "Retry-After" in answer.headers
            raise _PassingError(f"status {answer.status}: {found.shown}", _pause_s(answer), is_awaited=is_awaited)
        if len(data) > _MOST_BYTES:
            raise self.error(url, f"an answer of more than {_MOST_BYTES} bytes")
        return found


class _PassingError(Exception):
    """A failure that may pass in a moment, or after the pause that the other side asks for."""

    def __init__(self, what: str, pause_s: float = 0.0, *, is_awaited: bool = False) -> None:
        super().__init__(what)
        self.pause_s = pause_s
        self.is_awaited = is_awaited


def address(key: str, url: str) -> SplitResult:
    """The parts of an address.

    Args:
        key: What it was given as, for messages.
        url: The address.

    Raises:
        ConfigError: It is none, or holds a password.
    """
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"{key}: it holds a name or password, which recipes and logs would show; keys have a variable"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: {url!r} is no address; give one such as https://judge.example/v1")
    return parts


def away(parts: SplitResult) -> str:
    """The reason that no connection can be made to an address, and what to do; empty if something listens."""
    where = (parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme])
    try:
        socket.create_connection(where, _CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        return f"{parts.geturl()!r}: no connection ({getattr(error, 'strerror', None) or error}); {_REMEDY}"
    return ""


def is_in_the_clear(parts: SplitResult) -> bool:
    """True if others on the way can read the request."""
    return parts.scheme == "http" and not _is_this_machine(parts.hostname or "")


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


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
