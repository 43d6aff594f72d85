"""What is asked of a run, at a controller that answers as it is told to."""

import threading
from types import SimpleNamespace

import pytest
import zmq

from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.run import requests
from cosmos_core.transport import key_folder, sockets
from cosmos_core.transport.authentication import listen
from cosmos_core.transport.key_folder import AllowList
from cosmos_core.transport.keys import ALLOWED, controller_key
from cosmos_core.transport.messages import DOWN, REQUEST, UP, Answer, Command, Drain

DRAIN = Drain(name="rollout-1")


@pytest.fixture
def answering(monkeypatch, tmp_path):
    """Serve commands with a refusal, from the second time that each comes on; what came."""
    came, over = [], threading.Event()
    monkeypatch.setattr(requests, "_AGAIN_S", 0.05)
    keys = tmp_path / "keys"
    key_folder.ensure(keys)
    monkeypatch.setattr(requests, "load_job", lambda directory: type("Job", (), {"run_id": "demo-1", "keys": keys}))
    own, allowed = controller_key(keys).pair, AllowList(keys / ALLOWED)
    with (
        zmq.Context() as context,
        listen(context, "127.0.0.1", 0, sockets.CONTROL, own=own, allowed=allowed) as listener,
    ):
        socket = listener.socket
        monkeypatch.setattr(requests, "find_address", lambda job: sockets.address_of(socket))

        def serve(refusal):
            while not over.is_set():
                if socket.poll(20):
                    identity, data = socket.recv_multipart()
                    message = UP.decode(data)
                    if isinstance(message, Command):
                        came.append(message)
                        if len(came) > 1:
                            socket.send_multipart([identity, DOWN.encode(Answer(ident=message.ident, refusal=refusal))])

        threads = []

        def start(refusal=""):
            threads.append(threading.Thread(target=serve, args=(refusal,)))
            threads[0].start()
            return came

        yield start
        over.set()
        threads[0].join()


def test_a_pending_request_is_sent_once_a_second_until_it_is_answered():
    asked, pending = [], requests.PendingRequests()
    observer = SimpleNamespace(answers={}, ask=lambda request, ident: asked.append((request, ident)))
    ident = pending.add(DRAIN)
    for now in (10.0, 10.5, 11.5):
        pending.send(observer, now)
    assert asked == [(DRAIN, ident)] * 2
    observer.answers[ident] = ""
    pending.send(observer, 99.0)
    assert len(asked) == 2


def test_a_request_is_repeated_until_it_is_answered(answering, tmp_path):
    came = answering()
    requests.ask(tmp_path, DRAIN)
    assert len({command.ident for command in came}) == 1
    assert len(came) >= 2
    assert REQUEST.decode(came[0].request) == DRAIN


def test_a_refusal_is_an_error_with_its_reason(answering, tmp_path):
    answering("no replica rollout-1")
    with pytest.raises(ReplicaError, match="refused: no replica rollout-1"):
        requests.ask(tmp_path, DRAIN)


def test_a_folder_that_is_no_run_and_a_run_that_is_over_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        requests.ask(tmp_path, DRAIN)
    monkeypatch.setattr(requests, "load_job", lambda directory: None)
    monkeypatch.setattr(requests, "find_address", lambda job: None)
    monkeypatch.setattr(requests, "absence", lambda job: "its controller is gone")
    with pytest.raises(ReplicaError, match=r"does not go on \(its controller is gone\)"):
        requests.ask(tmp_path, DRAIN)
