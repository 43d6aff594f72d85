"""A server that speaks OpenEnv's WebSocket protocol: an environment that echoes, with a fault for each path."""

import asyncio
import collections
import contextlib
import itertools
import json
import threading

from aiohttp import WSMsgType, web


class Standin:
    """Serves on loopback, in a thread. `at(fault)` is the address where that fault is had.

    Attributes:
        heard: Messages by session, in the order in which sessions began.
        num_open: Sessions that are open, by fault.
        most_open: Room for sessions of each.
    """

    def __init__(self):
        self._thread = threading.Thread(target=self._serve)
        self._ready = threading.Event()

    def __enter__(self):
        self.forget()
        self.num_open = collections.Counter()
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def forget(self):
        self.heard, self.most_open = [], 1000
        self._numbers = itertools.count()

    def at(self, fault="sound"):
        return f"http://127.0.0.1:{self._port}/{fault}"

    def _serve(self):
        asyncio.run(self._run())

    async def _run(self):
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/{fault}/ws", self._session)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _session(self, request):
        fault = request.match_info["fault"]
        number = next(self._numbers)
        if fault == "status-500" or (fault == "status-503-once" and number == 0):
            return web.Response(status=int(fault.split("-")[1]), text="<h1>a fault</h1>")
        if fault in ("absent", "page"):
            return web.Response(status=404 if fault == "absent" else 200)
        if fault == "no-handshake":
            await asyncio.sleep(30)
        socket = web.WebSocketResponse(heartbeat=0.2 if fault == "pings" else None)
        await socket.prepare(request)
        if self.num_open[fault] >= self.most_open:
            await socket.send_json(_error("CAPACITY_REACHED", f"Server at capacity: {self.num_open[fault]} active."))
            await socket.close()
            return socket
        self.num_open[fault] += 1
        heard = []
        self.heard.append(heard)
        try:
            with contextlib.suppress(ConnectionError):  # who asked has hung up
                await self._play(request, socket, fault, number, heard)
        finally:
            self.num_open[fault] -= 1
        return socket

    async def _play(self, request, socket, fault, number, heard):
        seed, steps = 0, 0
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                return
            said = json.loads(message.data)
            heard.append(said)
            if said["type"] == "close":
                return
            if said["type"] == "reset":
                seed, steps = said["data"]["seed"], 0
                done = fault == "done-at-once"
                told = f"ready {number if fault == 'another' else seed % 10}"
                await socket.send_json(_seen({"message": told, "steps": 0, "more": None}, None, done))
                continue
            steps += 1
            dies = fault == "dies" or (fault in ("dies-once", "dies-early", "forgets", "another") and number == 0)
            if dies and steps == (1 if fault in ("another", "dies-early") else 2):
                request.transport.abort()
                return
            if steps == 2 and fault in ("hangs", "hangs-once") and (fault == "hangs" or number == 0):
                await asyncio.sleep(30)
            if fault in RAW:
                await socket.send_str(RAW[fault])
                continue
            if fault == "binary":
                await socket.send_bytes(b"{}")
                continue
            for _ in range(2 if fault == "twice" else 1):
                await socket.send_json(self._step(said["data"], steps + (10 * number if fault == "forgets" else 0)))

    def _step(self, action, steps):
        if set(action) != {"message"} or not isinstance(action["message"], str):
            fault = {"loc": ["message"], "msg": "Input should be a valid string", "type": "string_type"}
            return _error("VALIDATION_ERROR", "Invalid message", errors=[fault])
        if action["message"] == "fail":
            return _error("EXECUTION_ERROR", "it failed")
        return _seen(
            {"message": action["message"], "steps": steps, "more": {"ok": True}}, 0.5, action["message"] == "end"
        )


def _seen(observation, reward, done):
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def _error(code, message, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


RAW = {
    "no-json": "<html>",
    "deep": "[" * 100_000,
    "a-list": "[]",
    "a-state": '{"type": "state", "data": {}}',
    "no-data": '{"type": "observation"}',
    "no-fields": '{"type": "observation", "data": {"observation": "text", "reward": 1.0, "done": false}}',
    "old": '{"observation": {"message": "x"}, "reward": 1.0, "done": false}',
    "reward-of-text": '{"type": "observation", "data": {"observation": {}, "reward": "1.0", "done": false}}',
    "no-finite-reward": '{"type": "observation", "data": {"observation": {}, "reward": 1e999, "done": false}}',
    "endless-reward": '{"type": "observation", "data": {"observation": {}, "reward": 1%s, "done": false}}'
    % ("0" * 400),
    "done-in-words": '{"type": "observation", "data": {"observation": {}, "reward": 1.0, "done": "no"}}',
    "ended": '{"type": "error", "data": {"message": "it cannot be serialized", "code": "SESSION_ERROR"}}',
}
