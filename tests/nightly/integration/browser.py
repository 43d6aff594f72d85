"""A real headless Chromium, driven over its own protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_START_S = 60.0
_CALL_S = 30.0


def find() -> str | None:
    """Path of a Chromium of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Browser:
    """One tab of a browser of its own; closed with the context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self.complaints: list[str] = []
        """What the page logged as errors, and exceptions of its scripts."""

    def __enter__(self) -> Self:
        executable = find()
        assert executable is not None
        self._process = subprocess.Popen(
            [
                executable,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-extensions",
                "--disable-background-networking",
                "--no-first-run",
                "--remote-debugging-port=0",
                f"--user-data-dir={self._folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._run(self._connect())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self._run(self._close())
        self._end()

    def go(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, timeout_s: float = 20.0) -> Any:
        """Wait until an expression is truthy; its value, or true of an element."""
        deadline = time.monotonic() + timeout_s
        by_value = f"((found) => (found instanceof Node ? true : found))({expression})"
        while not (found := self.evaluate(by_value)):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {expression}"
            time.sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def submit(self, form: str, **values: str) -> None:
        """Fill in fields by their ids, and press the form's button."""
        for name, value in values.items():
            self.evaluate(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")
        self.evaluate(f"document.querySelector({json.dumps(form)} + ' button').click()")

    def screenshot(self, path: Path, *, width: int, height: int, dark: bool = False) -> None:
        """A picture of the page."""
        self.look(width=width, height=height, dark=dark)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """Be a screen of another size, in a light or dark room."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        return self._run(self._call(method, parameters))

    async def _connect(self) -> None:
        port_file = self._folder / "DevToolsActivePort"
        deadline = time.monotonic() + _START_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self._process.poll() is None, "the browser has ended"
            assert time.monotonic() < deadline, "the browser did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split("\n")[0]
        self._client = aiohttp.ClientSession()
        async with self._client.get(f"http://127.0.0.1:{port}/json/list") as answer:
            (tab,) = [found for found in await answer.json() if found["type"] == "page"]
        self._socket = await self._client.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=2**26)
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable", {})

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(_CALL_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, f"{method}: {message['error']}"
                    return message["result"]
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(message["params"]["entry"]["text"])

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await self._call("Browser.close", {})
        await self._socket.close()
        await self._client.close()

    def _end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)
