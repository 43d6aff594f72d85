"""A real HTTP server that judges and scores, well or badly, by the path that it is asked at."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-very-secret"


class Standin(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.failures, self.active, self.most_active = [], {}, 0, 0
        self.lock = threading.Lock()

    def num_requests(self, wanted):
        """How many came; `wanted` are waited for, as who asked may have given up before they are read."""
        end = time.monotonic() + 10
        while len(self.requests) < wanted and time.monotonic() < end:
            time.sleep(0.01)
        return len(self.requests)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body, time.monotonic()))
        # Who asked may have given up.
        with contextlib.suppress(OSError):
            self.answer(body)

    def answer(self, body):
        kind = self.path.split("/")[1]
        left = self.server.failures.get(kind, 0)
        if left:
            self.server.failures[kind] = left - 1
            return self.send(b"later", 503, {"Retry-After": "0.1"})
        if kind in ODD:
            return ODD[kind](self)
        if kind == "slow":
            self.work()
        made = JUDGED.get(kind, judged)(body) if "messages" in body else SCORED.get(kind, scored)(body)
        return self.send(json.dumps(made).encode())

    def work(self):
        with self.server.lock:
            self.server.active += 1
            self.server.most_active = max(self.server.most_active, self.server.active)
        time.sleep(0.05)
        with self.server.lock:
            self.server.active -= 1

    def send(self, data, status=200, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def hang_up(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def stay_silent(self):
        """Until who asked has given up."""
        self.close_connection = True
        self.connection.recv(1)

    def endless(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"[" * 65536)


ODD = {
    "refuse": lambda handler: handler.send(f"wrong key {handler.headers['Authorization']}".encode(), 401),
    "redirect": lambda handler: handler.send(b"", 302, {"Location": f"{handler.server.url}/elsewhere"}),
    "garbage": lambda handler: handler.send(b"<html>"),
    "hangs-up": Handler.hang_up,
    "silent": Handler.stay_silent,
    "endless": Handler.endless,
}


def said(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def judged(body):
    """What is longer is better."""
    length = len(body["messages"][0]["content"].partition("<answer>")[2].partition("</answer>")[0])
    return said(f"It says Score: 3 but I say:\n**Score: {min(10, length)}**")


def scored(body):
    return {"scores": [{"value": float(len(each["text"])), "details": {"n": 1}} for each in body["completions"]]}


JUDGED = {
    "no-number": lambda _: said("Score: high"),
    "no-score": lambda _: said("It is good."),
    "cut-off": lambda _: {"choices": [{"finish_reason": "length", "message": {"content": "Score: 10\nwhich is"}}]},
    "range": lambda _: said("Score: 5\nScore: 3-4"),
    "percent": lambda _: said("Score: 10%"),
    "of-five": lambda _: said("Score: 4 out of 5"),
    "thinking": lambda _: said("<think>\nScore: 10\nwould be too high"),
    "thought": lambda _: said("Score: 10\n</think>\nScore: 7"),
    "of-ten": lambda _: said("Score: 7 out of 10"),
    "slash": lambda _: said("**Score:** 7/10."),
    "below": lambda _: said("Score: -3"),
    "beyond": lambda _: said("Score: 11"),
    "huge": lambda _: said("Score: " + "9" * 400),
    "no-text": lambda _: {"choices": [{"message": {"content": None}}]},
    "no-choices": lambda _: {"choices": []},
    "a-list": lambda _: [1],
}
SCORED = {
    "too-few": lambda body: {"scores": scored(body)["scores"][1:]},
    "too-many": lambda body: {"scores": scored(body)["scores"] * 2},
    "no-scores": lambda _: {"score": 1},
    "a-list": lambda _: [1],
    "nan": lambda body: {"scores": [{"value": float("nan")} for _ in body["completions"]]},
    "huge": lambda body: {"scores": [{"value": 10**400} for _ in body["completions"]]},
    "truth": lambda body: {"scores": [{"value": True} for _ in body["completions"]]},
    "bare": lambda body: {"scores": [1.0 for _ in body["completions"]]},
    "odd-details": lambda body: {"scores": [{"value": 1, "details": [1]} for _ in body["completions"]]},
    "some": lambda body: {
        "scores": [{"error": "no idea"} if each["text"] == "bad" else {"value": 2} for each in body["completions"]]
    },
}
