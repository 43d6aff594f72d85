"""The port of a controller that is not there stays its own."""

from __future__ import annotations

import socket

import pytest
import zmq

from cosmos_core.errors import TransportError
from cosmos_core.run.supervisor import reserved
from cosmos_core.transport import sockets
from cosmos_core.transport.addresses import is_own


def test_controllers_alone_listen_at_a_reserved_port():
    with reserved("127.0.0.1", 0) as port:
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        for _ in range(20):
            with socket.socket() as client, pytest.raises(ConnectionRefusedError):
                client.connect(("127.0.0.1", port))
        for _ in range(2):
            with zmq.Context() as context, sockets.router(context, "127.0.0.1", port) as listening:
                assert sockets.address_of(listening) == f"tcp://127.0.0.1:{port}"
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    pass


def test_a_port_of_any_address_is_had_unless_it_is_taken():
    for bind in ["*", "0.0.0.0", *(["::1"] if is_own("::1") else [])]:
        with reserved(bind, 0) as port, zmq.Context() as context:
            sockets.router(context, bind, port).close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = f"port {port} of 127.0.0.1 cannot be had .*control.port"
        with pytest.raises(TransportError, match=message), reserved("127.0.0.1", port):
            pass
