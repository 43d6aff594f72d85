from __future__ import annotations

import psutil
import pytest

from cosmos_core.errors import TransportError
from cosmos_core.policy.processes.rendezvous import GroupStore


def test_a_store_listens_on_the_address_that_it_was_given_only(store):
    port = int(store.endpoint.rpartition(":")[2])
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(TransportError, match=r"cannot listen on 203\.0\.113\.7 \(.*\); set control\.bind"):
        GroupStore("203.0.113.7")
