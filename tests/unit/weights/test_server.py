"""What receivers may make a weight server keep."""

from __future__ import annotations

import threading

import pytest
import zmq

from cosmos_core.transport.sockets import dealer
from cosmos_core.weights import process_group, wire
from cosmos_core.weights import server as module
from cosmos_core.weights.server import SliceServer


@pytest.fixture
def may_give_up():
    """Before, no sender ceases to wait for its receiver."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def server(monkeypatch, may_give_up):
    pair = process_group.Pair

    def paired(*given, **named):
        assert may_give_up.wait(20)
        return pair(*given, **named)

    monkeypatch.setattr(module, "MAX_GROUPS", 2)
    monkeypatch.setattr(process_group, "FORM_S", 0.2)
    monkeypatch.setattr(process_group, "Pair", paired)
    found = SliceServer("run", "127.0.0.1")
    yield found
    may_give_up.set()
    found.close()


class Receiver:
    """Asks for a process group, comes to meet the sender, and goes no further."""

    def __init__(self, server, context, name):
        self._socket = dealer(context, server.endpoint, name, queued=True)

    def ask(self):
        self._socket.send(wire.CODEC.encode(wire.Open(request=1, run_id="run", backend="gloo")))
        assert self._socket.poll(5000)
        answer = wire.CODEC.decode(self._socket.recv())
        if isinstance(answer, wire.Opened):
            process_group.meet("127.0.0.1", answer.port, 5.0).set(process_group._CAME, "")
        return answer

    def close(self):
        self._socket.close()


def test_process_groups_are_bounded_and_more_are_refused_with_the_reason(server, may_give_up, caplog):
    with zmq.Context() as context:
        receivers = [Receiver(server, context, name) for name in (b"a", b"b", b"c")]
        one, two, three = receivers
        try:
            assert isinstance(one.ask(), wire.Opened)
            assert isinstance(two.ask(), wire.Opened)
            denied = three.ask()
            assert isinstance(denied, wire.Denied)
            assert "serves 2 receivers over process groups of their own already" in denied.reason
            assert "refused a process group: it has 2 (1 so far)" in caplog.text
            # Asking again for one's own group gives the old one up, which takes a moment: it counts until it is over.
            assert isinstance(one.ask(), wire.Denied)
            may_give_up.set()
            for sender in (*server._senders.values(), *server._leaving):
                sender.join(10.0)
            assert isinstance(three.ask(), wire.Opened)
        finally:
            for receiver in receivers:
                receiver.close()
