"""Which address a process has; on hosts of several networks in `tests/nightly/integration/test_hosts.py`."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from cosmos_core.errors import TransportError
from cosmos_core.transport import addresses
from cosmos_core.transport.addresses import (
    Place,
    address_towards,
    in_url,
    interface_of,
    interfaces,
    is_own,
    join_places,
    own_address,
    split_places,
)

NOBODY = "203.0.113.7"


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch):
    monkeypatch.delenv("COSMOS_HOST", raising=False)


@pytest.fixture
def machine(monkeypatch):
    """Give this machine other interfaces, and no routes."""

    def machine(**by_interface: str) -> None:
        found = {
            name: [SimpleNamespace(family=socket.AF_INET6 if ":" in each else socket.AF_INET, address=each)]
            for name, each in by_interface.items()
        }
        monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: found)
        monkeypatch.setattr(addresses, "_ELSEWHERE", ())

    return machine


def test_a_run_on_loopback_stays_there_whatever_is_chosen(monkeypatch):
    monkeypatch.setenv("COSMOS_HOST", NOBODY)
    assert own_address("127.0.0.1", NOBODY) == "127.0.0.1"
    assert own_address("[::1]") == "::1"


def test_bound_to_all_it_is_the_address_of_the_way_to_the_controller(monkeypatch, subtests):
    for bind in ["0.0.0.0", "*", "::", "[::]"]:
        with subtests.test(bind=bind):
            monkeypatch.setattr(addresses, "address_towards", {"10.1.2.3": "10.9.9.9"}.__getitem__)
            assert own_address(bind, "10.1.2.3") == "10.9.9.9"


def test_the_address_of_the_controllers_machine_is_not_taken_for_ones_own(monkeypatch):
    monkeypatch.setattr(addresses, "address_towards", {NOBODY: "10.9.9.9"}.__getitem__)
    assert own_address(NOBODY, NOBODY) == "10.9.9.9"
    monkeypatch.setattr(addresses, "is_own", lambda address: True)
    assert own_address(NOBODY, "10.1.2.3") == NOBODY


def test_without_routes_it_is_the_only_address_there_is(machine):
    machine(lo="127.0.0.1", eth0="10.0.0.7")
    assert own_address("0.0.0.0") == "10.0.0.7"
    # A tunnel to the controller leads to nobody else.
    assert own_address("0.0.0.0", "127.0.0.1") == own_address("0.0.0.0", "localhost") == "10.0.0.7"
    machine(lo="127.0.0.1")
    assert own_address("0.0.0.0") == "127.0.0.1"
    machine(lo="127.0.0.1", eth0="10.0.0.7", ib0="10.1.0.7")
    with pytest.raises(TransportError, match=r"several addresses \(10\.0\.0\.7, 10\.1\.0\.7\); say with COSMOS_HOST="):
        own_address("0.0.0.0")


def test_one_may_be_chosen_by_address_or_interface(machine, monkeypatch, subtests):
    for chosen in ["ib0", "10.1.0.7", " 10.1.0.7 "]:
        with subtests.test(chosen=chosen):
            machine(lo="127.0.0.1", eth0="10.0.0.7", ib0="10.1.0.7")
            monkeypatch.setenv("COSMOS_HOST", chosen)
            assert own_address("0.0.0.0", "10.0.0.1") == own_address("10.0.0.1", "10.0.0.1") == "10.1.0.7"


def test_a_choice_that_this_machine_has_not_is_told_with_those_it_has(machine, monkeypatch):
    machine(lo="127.0.0.1", eth0="10.0.0.7")
    monkeypatch.setenv("COSMOS_HOST", "ib0")
    with pytest.raises(TransportError, match=r"COSMOS_HOST=ib0: .* it has 127\.0\.0\.1 \(lo\), 10\.0\.0\.7 \(eth0\)"):
        own_address("0.0.0.0")


def test_a_name_that_nobody_knows_is_refused_with_what_to_do():
    with pytest.raises(TransportError, match=r"does not reach nowhere\.invalid \(.*\): check the name, .*COSMOS_HOST="):
        address_towards("nowhere.invalid")


def test_interfaces_of_this_machine():
    assert address_towards("127.0.0.1") == address_towards("localhost") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(NOBODY) == ""
    assert "lo" in interfaces()
    assert is_own("127.0.0.1")
    assert not is_own(NOBODY)
    assert not is_own("no address")
    assert (in_url("10.0.0.7"), in_url("fd00::7")) == ("10.0.0.7", "[fd00::7]")


def test_places_come_back_in_order():
    places = [Place(endpoint="tcp://10.0.0.1:5", host="a"), Place(endpoint="tcp://10.0.0.2:5", host="b.example")]
    assert split_places(join_places(places), "elsewhere") == places
    racks = [
        Place(endpoint="tcp://10.0.0.1:5", host="a", rack="r1"),
        Place(endpoint="tcp://[::1]:5", host="", rack="r2"),
    ]
    assert split_places(join_places(racks), "mine") == [
        racks[0],
        Place(endpoint="tcp://[::1]:5", host="mine", rack="r2"),
    ]
    # An address without a host is on the replica's own.
    assert split_places("tcp://10.0.0.1:5", "a") == [Place(endpoint="tcp://10.0.0.1:5", host="a")]
    assert split_places("", "a") == []
