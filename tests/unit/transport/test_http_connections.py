"""Connections that are quiet are ended, and those of clients that still read an answer are not."""

from types import SimpleNamespace

from cosmos_core.transport.http_connections import Connections


class Connection:
    """A connection with bytes that its client has not read."""

    def __init__(self, unread=0):
        self.unread, self.is_open = unread, True
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.unread, abort=self.abort)

    def abort(self):
        self.is_open = False


def test_an_answer_may_be_read_slowly_but_not_left_unread():
    reading, deaf, served, silent = Connection(100), Connection(100), Connection(), Connection()
    server, connections = SimpleNamespace(connections=[reading, deaf, served, silent]), Connections()
    connections.begin(served)
    for now in range(0, 80, 2):
        reading.unread -= 1
        connections.sweep(server, float(now), 15.0)
    assert [each.is_open for each in server.connections] == [True, False, True, False]
    for now in range(80, 100, 2):
        connections.sweep(server, float(now), 15.0)
    assert [each.is_open for each in server.connections] == [False, False, True, False]
