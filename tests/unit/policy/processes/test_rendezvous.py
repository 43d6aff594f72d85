from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch.distributed import PrefixStore

from cosmos_core.errors import TransportError
from cosmos_core.policy.processes import rendezvous as joining
from cosmos_core.policy.processes.group import GradientGroupError
from cosmos_core.policy.processes.rendezvous import GroupStore, form_group
from cosmos_core.transport.addresses import is_own


def enter(store, *, rank=0, address="127.0.0.1", interrupted=lambda: False, timeout_s=10.0):
    """Join generation 1 as one of two members."""
    return form_group(
        generation=1,
        rank=rank,
        size=2,
        store=store,
        address=address,
        device=torch.device("cpu"),
        interrupted=interrupted,
        timeout_s=timeout_s,
    )


def test_a_member_that_never_appears_is_named(store):
    with pytest.raises(GradientGroupError, match=r"generation 1: members \[1\] did not appear in 0\.2 s"):
        enter(store.endpoint, timeout_s=0.2)


def test_waiting_for_members_can_be_interrupted(store):
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    start = time.monotonic()
    with pytest.raises(GradientGroupError, match="interrupted"):
        enter(store.endpoint, interrupted=stop.is_set, timeout_s=30.0)
    assert time.monotonic() - start < 2.0


def test_no_store_is_an_error():
    with pytest.raises(GradientGroupError, match=r"cannot join at tcp://127\.0\.0\.1:1"):
        enter("tcp://127.0.0.1:1", rank=1, timeout_s=0.2)


def test_a_member_that_turns_away_before_it_connects_does_not_hold_up_the_others(store):
    # As one does that is interrupted once it was seen.
    shared = PrefixStore("generation-1/rank-0", store.shared)
    shared.set("here/1", "1")
    start = time.monotonic()
    with pytest.raises(GradientGroupError, match=r"generation 1: cannot join at tcp://.*timeout"):
        enter(store.endpoint, timeout_s=0.5)
    assert time.monotonic() - start < 10.0


@pytest.mark.parametrize(("interrupted", "timeout_s"), [(True, 60.0), (False, 0.5)])
def test_a_call_that_does_not_come_back_is_left_behind(store, monkeypatch, interrupted, timeout_s):
    is_over = threading.Event()
    # As of a store whose machine is cut off: torch waits as long as the system does.
    monkeypatch.setattr(joining, "connect", lambda *_, **__: is_over.wait(60))
    PrefixStore("generation-1/rank-0", store.shared).set("here/1", "1")
    start = time.monotonic()
    with pytest.raises(GradientGroupError, match=r"given up while tcp://127\.0\.0\.1:\d+ or a member did not answer"):
        enter(store.endpoint, interrupted=lambda: interrupted and time.monotonic() > start + 0.3, timeout_s=timeout_s)
    assert time.monotonic() - start < 20.0
    is_over.set()


@pytest.mark.skipif(not is_own("::1"), reason="this machine has no IPv6")
def test_addresses_may_be_of_ipv6():
    store = GroupStore("::1")
    assert store.endpoint == f"tcp://[::1]:{store.port}"
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: enter(store.endpoint, rank=rank, address="::1"), range(2))
        exchanged = pool.map(lambda group: group.exchange(b"x"), (first, second))
        assert list(exchanged) == [[b"x", b"x"]] * 2


def test_a_store_listens_on_the_address_that_it_was_given_only(store):
    port = int(store.endpoint.rpartition(":")[2])
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(TransportError, match=r"cannot listen on 203\.0\.113\.7 \(.*\); set control\.bind"):
        GroupStore("203.0.113.7")
