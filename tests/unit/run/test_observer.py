import threading
import time

import pytest
import zmq

from cosmos_core.control.machine.events import EVENTS
from cosmos_core.errors import TransportError
from cosmos_core.run.observer import Observer, so_far
from cosmos_core.transport import sockets
from cosmos_core.transport.messages import (
    DOWN,
    REQUEST,
    UP,
    Acknowledged,
    Answer,
    Command,
    Notices,
    Refused,
    Stop,
    Watch,
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("cosmos_core.run.observer._SILENCE_S", 0.2)


@pytest.fixture
def server():
    with zmq.Context() as context:
        socket = sockets.router(context, "127.0.0.1", 0)
        yield socket
        socket.close()


@pytest.fixture
def observer(server):
    observer = Observer(sockets.address_of(server), "demo-1")
    yield observer
    observer.close()


def hear(server, observer, kind, is_wanted=lambda message: True):
    """The next of a kind; what an observer says every ten seconds anyhow is not waited for."""
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        observer.poll(0.02)
        if server.poll(20):
            identity, data = server.recv_multipart()
            message = UP.decode(data)
            if isinstance(message, kind) and is_wanted(message):
                return identity, message
    raise AssertionError(f"no {kind.__name__} came")


def tell(server, identity, entries, gauges=None, last=0):
    encoded = tuple((number, when, EVENTS.encode(event)) for number, when, event in entries)
    notices = Notices(entries=encoded, last=last or len(entries), gauges=gauges or {})
    server.send_multipart([identity, DOWN.encode(notices)])


def collect(observer, count):
    found, deadline = [], time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        found += observer.poll(0.02)
    return found


def test_entries_come_once_in_order_whatever_is_repeated(server, observer, finished):
    identity, watch = hear(server, observer, Watch)
    assert (watch.run_id, watch.after) == ("demo-1", 0)
    tell(server, identity, finished.entries[:5])
    tell(server, identity, finished.entries[3:8])
    assert collect(observer, 8) == finished.entries[:8]
    assert observer.last_sequence == 8

    # Gauges are the newest.
    identity, _ = hear(server, observer, Watch)
    tell(server, identity, [], {"policy-0": {"step": 3.0}})
    deadline = time.monotonic() + 5
    while not observer.gauges and time.monotonic() < deadline:
        observer.poll(0.02)
    assert observer.gauges == {"policy-0": {"step": 3.0}}


def test_a_gap_is_asked_for_again_and_not_taken(server, observer, finished):
    identity, _ = hear(server, observer, Watch)
    tell(server, identity, finished.entries[:3])
    assert len(collect(observer, 3)) == 3
    tell(server, identity, finished.entries[5:7])
    _, watch = hear(server, observer, Watch, lambda watch: watch.again)
    assert watch.after == 3
    tell(server, identity, finished.entries[3:7])
    assert collect(observer, 4) == finished.entries[3:7]


def test_silence_renews_the_watch(server, observer):
    began = time.monotonic()
    hear(server, observer, Watch)
    hear(server, observer, Watch)
    assert time.monotonic() - began >= 0.2


def test_a_stop_is_asked_for_and_answers_are_kept(server, observer):
    # A stop is asked for.
    hear(server, observer, Watch)
    observer.ask(Stop(), "one")
    _, command = hear(server, observer, Command)
    assert command == Command(run_id="demo-1", ident="one", request=REQUEST.encode(Stop()))

    # Answers are kept beside notices.
    identity, _ = hear(server, observer, Watch)
    for answer in (Answer(ident="one"), Answer(ident="two", refusal="no such key")):
        server.send_multipart([identity, DOWN.encode(answer)])
    deadline = time.monotonic() + 5
    while len(observer.answers) < 2 and time.monotonic() < deadline:
        assert observer.poll(0.02) == []
    assert observer.answers == {"one": "", "two": "no such key"}


def test_what_is_not_for_observers_is_an_error(server, observer):
    identity, _ = hear(server, observer, Watch)
    server.send_multipart([identity, DOWN.encode(Acknowledged(term=1, acknowledged=1))])
    with pytest.raises(Exception, match="Acknowledged, not Notices"):
        collect(observer, 1)

    # A refusal for good is an error.
    identity, _ = hear(server, observer, Watch)
    server.send_multipart([identity, DOWN.encode(Refused(reason="this is run a, not b", is_final=True))])
    with pytest.raises(TransportError, match="refuses: this is run a, not b"):
        collect(observer, 1)


def test_the_journal_so_far_is_all_of_it_however_late_it_comes(server, finished):
    """A long journal comes in parts, with gauges between them."""
    found = []
    reader = threading.Thread(target=lambda: found.extend(so_far(sockets.address_of(server), "demo-1")))
    reader.start()
    identity, data = server.recv_multipart()
    assert isinstance(UP.decode(data), Watch)
    whole = finished.entries
    tell(server, identity, [], {"controller": {"events": 1.0}}, last=len(whole))
    for first in range(0, len(whole), 20):
        time.sleep(0.02)
        tell(server, identity, [], {"controller": {"events": 1.0}}, last=len(whole))
        tell(server, identity, whole[first : first + 20], last=len(whole))
    reader.join(10)
    assert not reader.is_alive()
    assert found == whole


def test_more_is_asked_for_after_every_ten_messages(server, observer, finished, monkeypatch):
    identity, _ = hear(server, observer, Watch)
    monkeypatch.setattr("cosmos_core.run.observer._SILENCE_S", 60.0)
    for place in range(10):
        tell(server, identity, finished.entries[place : place + 1])
    assert len(collect(observer, 10)) == 10
    _, watch = hear(server, observer, Watch, lambda watch: watch.after == 10)
    assert not watch.again
    for _ in range(3):
        observer.poll(0.02)
    assert not server.poll(0), "it is said once"


def test_what_was_lost_at_the_end_is_asked_for_again(server, observer, finished):
    identity, _ = hear(server, observer, Watch)
    tell(server, identity, finished.entries[:3], last=8)
    again, deadline = None, time.monotonic() + 5
    while again is None and time.monotonic() < deadline:
        tell(server, identity, [], {"controller": {"events": 1.0}}, last=8)
        observer.poll(0.05)
        if server.poll(0) and (watch := UP.decode(server.recv_multipart()[1])).again:
            again = watch
    assert again.after == 3


def test_a_controller_without_room_is_asked_again(server, observer, finished):
    identity, _ = hear(server, observer, Watch)
    server.send_multipart([identity, DOWN.encode(Refused(reason="64 observers watch the run already"))])
    hear(server, observer, Watch)
    assert observer.refusal == "64 observers watch the run already"
    assert observer.silence_s < 5
    tell(server, identity, finished.entries[:3])
    assert len(collect(observer, 3)) == 3
    assert observer.refusal == ""
