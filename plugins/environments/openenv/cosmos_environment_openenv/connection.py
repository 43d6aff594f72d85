"""One episode on an OpenEnv server: a WebSocket with JSON there and back, as `openenv-core` 0.2 and 0.3 speak it.

Each connection has an environment of its own, which is closed with it. The server's `POST /reset` and `POST /step` are
of no use here: each request makes an environment and closes it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from typing import Final

import aiohttp
import attrs

from cosmos_core.errors import PluginError, TransportError
from cosmos_core.types import JSON

_MOST_BYTES: Final = 1 << 26
_MOST_WAITING: Final = 8
_CLOSE_S: Final = 1.0
_OVER: Final = (
    aiohttp.WSMsgType.CLOSE,
    aiohttp.WSMsgType.CLOSING,
    aiohttp.WSMsgType.CLOSED,
    aiohttp.WSMsgType.ERROR,
)


class LostError(TransportError):
    """An episode is gone with its connection, or its server hangs: another connection may do better."""


class FullError(LostError):
    """The server has no place for one more episode now."""


class ServerError(PluginError):
    """The server answered with an error, or with what is no answer.

    Attributes:
        code: The server's code; empty for what is no answer.
        said: What it says is wrong.
    """

    def __init__(self, where: str, code: str, said: str) -> None:
        super().__init__(f"{where}: {code or 'no answer of an OpenEnv server'}: {said}")
        self.code: Final = code
        self.said: Final = said


@attrs.frozen(kw_only=True)
class Answer:
    """What the server says of a reset or a step: fields of the observation, reward, and whether it was the last."""

    observation: Mapping[str, JSON]
    reward: float
    done: bool


class Connection:
    """A WebSocket to a server. Made by `open`."""

    def __init__(self, where: str, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._where: Final = where
        self._session: Final = session
        self._socket: Final = socket
        self._answers: Final = asyncio.Queue[aiohttp.WSMessage](_MOST_WAITING)
        self._reader: Final = asyncio.ensure_future(self._read())

    @classmethod
    async def open(cls, url: str, timeout_s: float) -> Connection:
        """Connect.

        Raises:
            LostError: Nothing answers there, or it has a fault that may pass.
            ServerError: It answers, but is no OpenEnv server.
        """
        where = f"{url.rstrip('/')}/ws"
        session, socket = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)), None
        try:
            async with asyncio.timeout(timeout_s):
                closing = aiohttp.ClientWSTimeout(ws_close=_CLOSE_S)
                socket = await session.ws_connect(where, max_msg_size=_MOST_BYTES, timeout=closing)
        except aiohttp.WSServerHandshakeError as error:
            if error.status >= 500 or error.status in (408, 429):
                raise LostError(f"{where}: HTTP {error.status} in place of a WebSocket") from error
            said = (
                f"HTTP {error.status} in place of a WebSocket; give the address of a server of openenv-core 0.2 or 0.3"
            )
            raise ServerError(where, "", said) from error
        except TimeoutError as error:
            raise LostError(f"{where}: no connection within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LostError(f"{where}: no connection: {error}") from error
        finally:
            if socket is None:
                await session.close()
        return cls(where, session, socket)

    async def ask(self, kind: str, data: Mapping[str, JSON], timeout_s: float) -> Answer:
        """Send a `reset` or a `step`, and wait for its answer.

        Raises:
            LostError: The connection is gone, or there is no answer in time.
            ServerError: The server refuses, fails, or answers something else.
        """
        if not self._answers.empty():
            self._read_answer(self._answers.get_nowait())
            raise ServerError(self._where, "", "it answers what it was not asked")
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                message = await self._answers.get()
        except TimeoutError as error:
            raise LostError(f"{self._where}: no answer to a {kind} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LostError(f"{self._where}: the connection is gone: {error}") from error
        return self._read_answer(message)

    async def close(self) -> None:
        """Let the server close its environment, and hang up, however long it takes for that."""
        try:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._socket.send_str('{"type": "close"}')
                    await self._socket.close()
        finally:
            self._reader.cancel()
            await asyncio.wait({self._reader})
            await self._session.close()

    async def _read(self) -> None:
        """Take in messages: aiohttp answers a server's pings only while somebody receives, and a turn may take long."""
        while True:
            message = await self._socket.receive()
            await self._answers.put(message)
            if message.type in _OVER:
                return

    def _read_answer(self, message: aiohttp.WSMessage) -> Answer:
        if message.type in _OVER:
            raise LostError(
                f"{self._where}: the server closed the connection ({self._socket.close_code or message.data})"
            )
        try:
            said = json.loads(message.data)
        except (ValueError, RecursionError):
            said = None
        match said:
            case {"type": "error", "data": {"code": str(code), "message": str(told), **more}}:
                if code == "CAPACITY_REACHED":
                    raise FullError(f"{self._where}: {told}; start it with more `max_concurrent_envs`, or more servers")
                if code == "FACTORY_ERROR":
                    raise LostError(f"{self._where}: {told}")
                raise ServerError(self._where, code, _faults(more.get("errors")) or told)
            case {"type": "observation", "data": {"observation": dict(seen), **more}}:
                reward, done = _finite(more.get("reward")), more.get("done", False)
                if reward is not None and isinstance(done, bool):
                    return Answer(observation=seen, reward=reward, done=done)
        raise ServerError(self._where, "", f"{message.data!r:.200}")


def _finite(reward: object) -> float | None:
    """A reward as a number, none being 0; None for what is no finite number."""
    try:
        value = float(reward) if isinstance(reward, int | float) else 0.0 if reward is None else math.inf
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def _faults(errors: object) -> str:
    """What pydantic says of an action's fields, in a line; empty if it says nothing."""
    told = list[str]()
    for error in errors if isinstance(errors, list) else []:
        match error:
            case {"msg": str(fault), "loc": [*place]}:
                told.append(f"{'.'.join(map(str, place))}: {fault}" if place else fault)
    return "; ".join(told)
