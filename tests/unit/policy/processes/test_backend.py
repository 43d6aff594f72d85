from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from cosmos_core.errors import ReplicaError
from cosmos_core.policy.processes import backend as interfaces
from cosmos_core.policy.processes.backend import GLOO, NCCL, gloo_devices, use_interface_of


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in (GLOO, NCCL, interfaces._OURS):
        # Set first, so that what the code sets is taken back, too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_process_groups_use_the_interface_of_the_address(monkeypatch):
    monkeypatch.setattr(interfaces, "interface_of", {"10.0.0.7": "eth0"}.__getitem__)
    use_interface_of("10.0.0.7")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("eth0", "=eth0")


def test_on_one_host_gloo_uses_loopback_and_nccl_finds_its_way():
    use_interface_of("127.0.0.1")
    assert os.environ[GLOO] == "lo"
    assert NCCL not in os.environ


def test_a_group_uses_the_address_itself_not_the_first_one_of_its_interface(monkeypatch):
    made = []
    monkeypatch.setattr(interfaces, "ProcessGroupGloo", SimpleNamespace(create_device=lambda **how: made.append(how)))
    for _ in range(2):
        use_interface_of("127.0.0.1")
        gloo_devices("127.0.0.1")
    assert made == [{"hostname": "127.0.0.1"}] * 2
    monkeypatch.setenv(GLOO, "eth0")
    gloo_devices("127.0.0.1")
    assert made[2:] == [{"interface": "eth0"}]


def test_an_address_without_an_interface_leaves_them_to_themselves():
    use_interface_of("203.0.113.7")
    assert GLOO not in os.environ
    assert NCCL not in os.environ
    assert len(gloo_devices("127.0.0.1")) == 1
    with pytest.raises(RuntimeError, match=r"Cannot resolve 203\.0\.113\.7"):
        gloo_devices("203.0.113.7")


def test_what_the_environment_says_stays(monkeypatch):
    monkeypatch.setenv(GLOO, "lo,lo")
    monkeypatch.setenv(NCCL, "^docker")
    use_interface_of("127.0.0.1")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("lo,lo", "^docker")
    assert len(gloo_devices("127.0.0.1")) == 2


def test_an_interface_that_this_machine_has_not_is_named_with_those_it_has(monkeypatch):
    monkeypatch.setenv(GLOO, "lo,ib7")
    with pytest.raises(ReplicaError, match=r"GLOO_SOCKET_IFNAME=lo,ib7: .* no interface 'ib7', it has .*lo"):
        use_interface_of("127.0.0.1")
