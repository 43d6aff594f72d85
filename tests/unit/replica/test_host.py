from __future__ import annotations

import platform
from pathlib import Path

from cosmos_core.replica import host


def test_it_is_the_same_every_time_and_names_the_machine():
    assert host.host_id() == host.host_id()
    assert host.host_id().startswith(f"{platform.node()}/")


def test_without_a_boot_id_the_name_is_left(monkeypatch):
    monkeypatch.setattr(host, "_BOOT_ID", Path("/nowhere"))
    assert host.host_id() == f"{platform.node()}/unknown-boot"
