from __future__ import annotations

import random
import threading
import time

import pytest

from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.replica.client import ControlClient
from cosmos_core.transport.messages import DOWN, Acknowledged, Beat, Directive, Hello, Refused, Reports, Welcome
from cosmos_core.transport.outbox import Outbox
from cosmos_core.transport.reports import REPORT, CheckpointSaved, Failed


def spent_s():
    """Seconds of processor of this thread and the client's."""
    threads = [each for each in threading.enumerate() if each.name == "control" and each.ident is not None]
    assert threads
    return time.thread_time() + sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident)) for each in threads)


@pytest.fixture
def client(peer, hello):
    with ControlClient(peer.address, hello, 0.2, lambda: {"load": 0.5}) as client:
        yield client


@pytest.fixture
def joined(client, peer):
    peer.expect(Hello)
    peer.send(Welcome(term=1, acknowledged=0))
    return client


def test_the_identity_at_the_socket_cannot_be_known_to_others(client, peer, hello):
    assert peer.next() == hello
    one = peer.identity
    end = time.monotonic() + 3
    with ControlClient(peer.address, hello, 0.2):
        while peer.identity == one:
            assert time.monotonic() < end
            peer.next(0.5)
    for identity in (one, peer.identity):
        assert len(identity) == 32
        assert identity[0] != 0  # which libzmq keeps for itself
        assert hello.name.encode() not in identity
        assert hello.incarnation.encode() not in identity


def test_reports_arrive_in_order_and_are_confirmed(joined, peer):
    for step in (1, 2, 3):
        joined.report(CheckpointSaved(step=step, path="p"))
    assert not joined.flush(0.05)
    received = []
    while len(received) < 3:
        message = peer.expect(Reports)
        assert message.first == len(received) + 1
        received += [REPORT.decode(data).step for data in message.reports]
    peer.send(Acknowledged(term=1, acknowledged=3))
    assert joined.flush(3)
    assert received == [1, 2, 3]
    assert peer.expect(Beat).gauges == {"load": 0.5}
    joined.report(Failed(reason="no file \ud800.png"))
    first, second = peer.expect(Reports), peer.expect(Reports)
    assert first == second, "it is said again until it is confirmed"
    # UTF-8 cannot hold all of it.
    assert REPORT.decode(first.reports[0]) == Failed(reason="no file ?.png")


def test_a_report_is_under_way_at_once(peer, hello):
    delays = []
    with ControlClient(peer.address, hello, 60.0) as client:
        peer.expect(Hello)
        peer.send(Welcome(term=1, acknowledged=0))
        peer.expect(Beat)
        for step in range(20):
            began = time.monotonic()
            client.report(CheckpointSaved(step=step, path="p"))
            message = peer.expect(Reports, 6.0)  # sooner than anything else would have woken it
            delays.append(time.monotonic() - began)
            peer.send(Acknowledged(term=1, acknowledged=message.first))
            assert client.flush(30)
    # About 0.3 ms; on a very busy machine the median is 40 ms. Of a client that looks now and then, all are late.
    assert sorted(delays)[2] < 0.02
    assert sorted(delays)[10] < 0.5


def test_directives_wake_the_waiter_who_gets_the_newest_and_so_does_the_end(joined, peer):
    threading.Timer(0.05, peer.send, [Directive(term=1, revision=3, acknowledged=0)]).start()
    assert joined.wait_directive(0, 3).revision == 3
    assert joined.wait_directive(3, 0.05) is None
    for revision in (4, 6, 5):
        peer.send(Directive(term=1, revision=revision, acknowledged=0))
    while peer.expect(Beat).revision != 6:
        pass
    assert joined.wait_directive(3, 1).revision == 6
    assert joined.wait_directive(6, 0) is None
    threading.Timer(0.05, joined.close).start()
    assert joined.wait_directive(6, 30) is None
    joined.close()


def test_a_restarted_controller_numbers_from_the_start(joined, peer):
    peer.send(Directive(term=1, revision=50, acknowledged=0))
    assert joined.wait_directive(0, 3).revision == 50
    joined.report(Failed(reason="x"))
    joined.set_step(9)
    peer.expect(Reports)
    peer.restart()
    peer.expect(Beat)
    peer.send(Acknowledged(term=2, acknowledged=0))
    assert peer.expect(Hello).step == 9
    peer.send(Welcome(term=2, acknowledged=0))
    assert peer.expect(Reports).term == 2
    peer.send(Directive(term=2, revision=1, acknowledged=1))
    directive = joined.wait_directive(50, 3)
    assert (directive.term, directive.revision) == (2, 1)
    assert joined.flush(1)
    assert joined.wait_directive(1, 0) is None


def test_a_refused_replica_learns_why(joined, peer):
    joined.check()
    peer.send(Refused(reason="fenced"))
    with pytest.raises(ReplicaError, match="rollout-0: the controller refused this replica: fenced"):
        joined.wait_directive(0, 3)
    with pytest.raises(ReplicaError, match="fenced"):
        joined.check()
    joined.report(Failed(reason="x"))
    assert not joined.flush(30)  # at once: nobody will confirm it


def test_malformed_messages_change_nothing_and_flood_no_log(joined, peer, caplog):
    rng = random.Random(11)
    peer.send(Directive(term=1, revision=1, acknowledged=0))
    assert joined.wait_directive(0, 3).revision == 1
    good = DOWN.encode(Directive(term=1, revision=2, acknowledged=0))
    sent = 0
    while sent < 3000:
        mutant = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        try:
            DOWN.decode(bytes(mutant))
        except TransportError:
            peer.send_raw(bytes(mutant))
            sent += 1
    for _ in range(10):
        peer.send_raw(good, *[good] * 500)
        time.sleep(0.01)
    assert joined.wait_directive(1, 0.3) is None
    peer.send(Directive(term=1, revision=2, acknowledged=0))
    assert joined.wait_directive(1, 3).revision == 2
    joined.check()
    assert 0 < len(caplog.records) < 20


def test_without_a_controller_it_waits_and_closes_at_once(hello):
    malformed = ControlClient("nowhere", hello, 1.0)
    with pytest.raises(TransportError, match="tcp://HOST:PORT"):
        malformed.start()
    malformed.close()
    with ControlClient("tcp://127.0.0.1:1", hello, 1.0, outbox=Outbox(max_reports=1)) as client:
        began = spent_s()
        client.report(Failed(reason="x"))
        with pytest.raises(TransportError, match="outbox is full"):
            client.report(Failed(reason="y"))
        assert client.wait_directive(0, 0.3) is None
        assert not client.flush(0.1)
        client.check()
        assert spent_s() - began < 0.1  # it does not poll


def test_a_failing_thread_is_reported(peer, hello, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with ControlClient(peer.address, hello, 0.2, lambda: {}["missing"]) as client:
        peer.expect(Hello)
        peer.send(Welcome(term=1, acknowledged=0))
        with pytest.raises(ReplicaError, match=r"line to the controller failed: KeyError\('missing'\)") as caught:
            client.wait_directive(0, 3)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_controller_that_forgot_reports_is_reported(joined, peer):
    joined.report(Failed(reason="x"))
    peer.expect(Reports)
    peer.send(Acknowledged(term=1, acknowledged=1))
    assert joined.flush(3)
    peer.send(Welcome(term=2, acknowledged=0))
    with pytest.raises(ReplicaError, match="its journal lost its end"):
        joined.wait_directive(0, 3)
    assert not joined.refused.is_final


def test_an_idle_client_uses_no_cpu(joined):
    began = spent_s()
    time.sleep(0.5)
    assert spent_s() - began < 0.1  # spinning would be 0.5 or, on a busy machine, half of it
