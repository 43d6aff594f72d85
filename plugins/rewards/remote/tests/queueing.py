"""Real HTTP servers that queue requests, in both formats, well or badly, by the path that they are asked at."""

import io
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np
from safetensors.numpy import load

TOKEN = "wfm-very-secret"


MISSING = {"ours": (404, {"message": "no request is known"}), "elsewhere": (404, b"<html>"), "bare": (404, {})}
"""What is said of results that nobody has, by path; otherwise as cosmos-rl's service does."""


class Queueing(ThreadingHTTPServer):
    """Every scorer gives each completion the mean of its array; `NaN` and `error` rows are asked for by path."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.reset()

    def reset(self):
        self.requests, self.jobs, self.busy, self.polls, self.most_bytes = [], {}, 0, 0, 1 << 30
        self.checks, self.absent = [], 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, status, said, headers=None):
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except OSError:  # who asked has given up
            self.close_connection = True

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.send(401, f"not {self.headers.get('Authorization')}".encode())
        kind, _, verb = self.path.strip("/").partition("/")
        if verb == "pull" and b"uuid=00000000" in data:
            self.server.checks.append((dict(self.headers), parse_qs(data.decode())))
            return self.send(*MISSING.get(kind, (400, {"message": "Not found scores"})))
        return self.take(kind, verb, data)

    def take(self, kind, verb, data):
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), data, time.monotonic()))
            if self.server.busy:
                self.server.busy -= 1
                return self.send(429, {"error": "full"}, {"Retry-After": "0.2"})
        if kind == "stuck":
            time.sleep(1.5)
        if verb == "pull":
            return self.pull(kind, parse_qs(data.decode()))
        line, _, arrays = data.partition(b"\n")
        line = json.loads(line)
        refusal = self.refusal(kind, line, len(data))
        if refusal is not None:
            return self.send(*refusal)
        ticket = self.headers.get("Idempotency-Key") or f"u{len(self.server.jobs)}"
        if "prompts" in line:
            rows, scorers = np.load(io.BytesIO(arrays)), list(line["reward_fn"])
        else:
            named = load(arrays)
            rows, scorers = [named[str(index)] for index in range(len(named))], line["scorers"]
        self.server.jobs[ticket] = (kind, [float(row.mean()) for row in rows], scorers, rows)
        if "prompts" in line:
            return self.send(200, {"uuid": ticket, "replica_id": "r7"})
        return self.send(202, {"id": ticket, "status": "pending"})

    def refusal(self, kind, line, size_bytes):
        """Status and body, where a request is refused for what it is."""
        if size_bytes > self.server.most_bytes:
            return 413, {"error": "body_mb"}
        if kind == "no-images" and line.get("media_type") == "image":
            return 400, {"message": "no images"}
        if kind == "refused" or (kind == "picky" and any(each["fps"] != 8.0 for each in line["completions"])):
            return 400, {"error": "scorers: 'x' is none of this service; it has a, b"}
        return None

    def do_GET(self):
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if parts.path.endswith("/enqueue"):
            return self.check(parts.path.split("/")[1], query)
        if not parts.path.endswith("/fetch"):
            return self.send(404, {"error": "404: Not Found"})
        if query["id"][0] not in self.server.jobs:
            return self.send(404, {"error": f"no request {query['id'][0]!r} is known"})
        return self.fetch(query["id"][0])

    def fetch(self, ticket):
        kind, values, scorers, _ = self.server.jobs[ticket]
        with self.server.lock:
            self.server.polls += 1
            polls = self.server.polls
        if kind == "expired":
            return self.send(410, {"error": "the result has expired"})
        if kind == "hasty" and polls < 4:
            return self.send(202, {"id": ticket, "status": "pending"})
        if kind == "never" or (kind == "pending" and polls < 3):
            time.sleep(0.05)
            return self.send(202, {"id": ticket, "status": "pending"})
        if kind == "garbage":
            return self.send(200, b"<html>")
        rows = {name: [{"value": value, "detail": f"by {name}"} for value in values] for name in scorers}
        if kind == "odd":
            rows[scorers[0]][0] = {"value": float("nan")}
        if kind == "huge":
            rows[scorers[0]][0] = {"value": 10**400}
        if kind == "failed":
            rows[scorers[0]][0] = {"error": "no score within 1 s", "status": "reward_timeout"}
        if kind == "too-few":
            rows[scorers[0]] = rows[scorers[0]][1:]
        if kind == "absent":
            del rows[scorers[0]]
        return self.send(200, {"id": ticket, "status": "done", "scores": rows})

    def check(self, kind, query):
        with self.server.lock:
            self.server.checks.append((dict(self.headers), query))
            if self.server.absent:
                self.server.absent -= 1
                return self.hang_up()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.send(401, b"the token is missing or another one")
        if kind == "older":
            return self.send(405, {"error": "405: Method Not Allowed"})
        if kind == "silent":
            time.sleep(0.5)
        if kind == "strange" or "x" in query["scorer"]:
            return self.send(400, {"error": "scorers: 'x' is none of this service; it has a, b"})
        return self.send(200, {"scorers": {"a": ["latents", "media"], "b": ["media"]}})

    def hang_up(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def pull(self, kind, form):
        (ticket,), (scorer,) = form["uuid"], form["type"]
        with self.server.lock:
            self.server.polls += 1
            polls = self.server.polls
        if polls < 3 or kind == "never":
            return self.send(400, {"message": f"Not found scores for {ticket}"})
        if self.headers.get("X-Lepton-Replica-Target") != "r7":
            return self.send(404, {"message": "another replica"})
        values = self.server.jobs[ticket][1]
        scores = {scorer: values, "first": values, "second": [1.0] * len(values)}
        if kind == "renamed":
            del scores[scorer]
        return self.send(200, {"scores": scores, "input_info": {}, "duration": "0.1", "type": scorer})
