from __future__ import annotations

import platform
from pathlib import Path

import pytest

from cosmos_core.errors import ReplicaError
from cosmos_core.transport import addresses


def test_it_is_the_same_every_time_and_names_the_machine(monkeypatch):
    assert addresses.host_id() == addresses.host_id()
    assert addresses.host_id().startswith(f"{platform.node()}/")
    monkeypatch.setattr(addresses, "_BOOT_ID", Path("/nowhere"))
    assert addresses.host_id() == f"{platform.node()}/unknown-boot"


def test_the_rack_is_what_the_machine_is_labelled_with(monkeypatch):
    monkeypatch.delenv("COSMOS_RACK", raising=False)
    assert addresses.rack_id() == ""
    for label, rack in (("", ""), (" rack-7\n", "rack-7")):
        monkeypatch.setenv("COSMOS_RACK", label)
        assert addresses.rack_id() == rack
    for label in ("row 3", "rack@home"):
        monkeypatch.setenv("COSMOS_RACK", label)
        with pytest.raises(ReplicaError, match=f"COSMOS_RACK='{label}': .* give one word"):
            addresses.rack_id()
