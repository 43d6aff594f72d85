"""Serves a reward service until it is stopped: begins what is asked, ends what was begun."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from aiohttp import http_exceptions, web

from cosmos_core.config.checks import is_loopback
from cosmos_core.errors import ConfigError
from cosmos_core.transport.connection_limiter import raised_limit
from cosmos_core.transport.http_connections import Connections
from cosmos_service_reward_service.application import Application
from cosmos_service_reward_service.service import Service
from cosmos_service_reward_service.settings import ServiceSettings, kinds_of

_HTTP: Final = logging.getLogger(f"{__name__}.http")
_SWEEP_S: Final = 2.0


def serve(settings: ServiceSettings, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for what was begun.

    Args:
        settings: The service's file.
        say: Tells people.

    Raises:
        ConfigError: The token is not set, the address is taken, or a scorer refuses its options.
        PluginError: A scorer is missing or broken, or cannot be loaded.
    """
    token = os.environ.get(settings.token_variable, "").strip()
    if not token:
        raise ConfigError(
            f"token_variable: {settings.token_variable} is not set; set it to what requests must bring, such as the "
            "output of: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    kinds = kinds_of(settings)
    # Scorers and what they start have no need of it.
    os.environ.pop(settings.token_variable)
    asyncio.run(_serve(settings, kinds, token, say))


async def _serve(
    settings: ServiceSettings, kinds: dict[str, frozenset[str]], token: str, say: Callable[[str], None]
) -> None:
    service = Service(settings, kinds)
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: hurry.set() if stop.is_set() else stop.set())
    # Who hangs up while a body comes, or while it waits for a result, is not waited for. Nothing is unpacked, whoever
    # sends it: the parser would do so before the token is looked at.
    application = Application(service, token)
    _HTTP.addFilter(_is_own_fault)
    runner = web.AppRunner(
        application.made(),
        access_log=None,
        logger=_HTTP,
        shutdown_timeout=1.0,
        handler_cancellation=True,
        auto_decompress=False,
    )
    try:
        if not await _before(service.start(), stop):
            return
        await runner.setup()
        address = await _listen(runner, settings)
        told = ", ".join(f"{name} ({', '.join(sorted(scores))})" for name, scores in kinds.items())
        say(f"Reward service at {address}: {told}. Ctrl-C ends it.")
        # Others need TLS before it, whose address is not known here.
        if is_loopback(settings.host):
            say(f"Runs find it by WFM_REWARD_ENQUEUE_URL={address}/v1/enqueue WFM_REWARD_FETCH_URL={address}/v1/fetch")
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(service.supervise()),
                group.create_task(_sweep(application.connections, runner, settings.upload_s)),
            ]
            await stop.wait()
            await _drain(service, hurry, say)
            for each in tasks:
                each.cancel()
    finally:
        await service.close()
        await runner.cleanup()


def _is_own_fault(record: logging.LogRecord) -> bool:
    """Whether a record tells of more than a request that is no HTTP: it may be anybody's, and hold the token.

    aiohttp cannot answer an `Expect` that is no ASCII.
    """
    foreign = (http_exceptions.HttpProcessingError, UnicodeEncodeError)
    return not (record.exc_info and isinstance(record.exc_info[1], foreign))


async def _sweep(connections: Connections, runner: web.AppRunner, idle_s: float) -> None:
    """End connections from which no whole request came for so long, or that do not read their answers."""
    raised_limit()
    while runner.server is not None:
        connections.sweep(runner.server, time.monotonic(), idle_s)
        await asyncio.sleep(min(_SWEEP_S, idle_s))


async def _before(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Do some work; False if the service was stopped first."""
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        working.cancel()
        stopped.cancel()


async def _listen(runner: web.AppRunner, settings: ServiceSettings) -> str:
    site = web.TCPSite(runner, settings.host, settings.port)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"port: cannot listen at {settings.host}:{settings.port}: {error.strerror}") from None
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _drain(service: Service, hurry: asyncio.Event, say: Callable[[str], None]) -> None:
    """Take nothing on any more, and wait for what was begun."""
    service.is_stopping = True
    say(f"Stopping: waiting up to {service.settings.drain_s:g} s for what was begun. Ctrl-C ends it at once.")
    waiting = [asyncio.ensure_future(service.drained()), asyncio.ensure_future(hurry.wait())]
    await asyncio.wait(waiting, timeout=service.settings.drain_s, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()
