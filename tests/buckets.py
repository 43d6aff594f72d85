"""A server of S3 buckets on this machine, which can refuse, and go away and come back. Needs moto."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

KEY: Final = "AKIA-OF-NOBODY"
SECRET: Final = "a-secret-that-nobody-tells"
REFUSAL: Final = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message></Error>"
)
_ACCOUNT: Final = "123456789012"
"""Whose buckets moto serves to any key."""

_Start = Callable[[str, list[tuple[str, str]]], Any]


class BucketServer:
    """Serves buckets over HTTP; what they hold stays in this process, whether it serves or not.

    Attributes:
        requests: Method, path and range of each request so far.
        is_expired: Whether requests are answered as those whose credentials have expired.
        fault: Called with each request (method, path); the body of the answer 503 if it gives one.
    """

    def __init__(self) -> None:
        # The test that asks for it may be skipped for want of them.
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.requests: list[tuple[str, str, str]] = []
        self.is_expired = False
        self.fault: Callable[[str, str], bytes | None] = lambda _method, _path: None
        self._app: Final = DomainDispatcherApplication(create_backend_app)
        self._server: Any = None
        self._port = 0

    @property
    def url(self) -> str:
        """Where it serves; the same after it was away."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def credentials(self) -> dict[str, str]:
        """Variables of the environment with which checkpoints, weights and data are in its buckets."""
        return {
            "PROD_S3_CHECKPOINT_ACCESS_KEY_ID": KEY,
            "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY": SECRET,
            "PROD_S3_CHECKPOINT_ENDPOINT_URL": self.url,
            "PROD_S3_CHECKPOINT_REGION_NAME": "us-east-1",
        }

    def start(self) -> None:
        """Serve."""
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_: Any) -> None:
                pass

        self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True, request_handler=Silent)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True, name="buckets").start()

    def stop(self) -> None:
        """Serve no longer; connections are refused."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def make_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        from moto.s3.models import s3_backends

        s3_backends[_ACCOUNT]["aws"].create_bucket(name, "us-east-1")

    @contextmanager
    def away(self, seconds: float) -> Iterator[None]:
        """Stop, and start again after some seconds, by itself; waits for that at the end."""
        self.stop()

        def come_back() -> None:
            time.sleep(seconds)
            self.start()

        thread = threading.Thread(target=come_back, daemon=True, name="buckets-away")
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def _answer(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, environ.get("HTTP_RANGE", "")))
        if self._server is None:
            # A connection that was kept open: the server of a machine that is gone does not answer on it either.
            raise ConnectionAbortedError
        if self.is_expired:
            return _refuse(environ, start, "403 Forbidden", REFUSAL)
        body = self.fault(method, path)
        if body is not None:
            return _refuse(environ, start, "503 Service Unavailable", body)
        answer: Iterable[bytes] = self._app(environ, start)
        return answer


def _refuse(environ: dict[str, Any], start: _Start, status: str, body: bytes) -> Iterable[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body))), ("Connection", "close")])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
