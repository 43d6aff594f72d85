from __future__ import annotations

import platform
from pathlib import Path

import pytest

from cosmos_core.errors import ReplicaError
from cosmos_core.transport import addresses


def test_it_is_the_same_every_time_and_names_the_machine():
    assert addresses.host_id() == addresses.host_id()
    assert addresses.host_id().startswith(f"{platform.node()}/")


def test_without_a_boot_id_the_name_is_left(monkeypatch):
    monkeypatch.setattr(addresses, "_BOOT_ID", Path("/nowhere"))
    assert addresses.host_id() == f"{platform.node()}/unknown-boot"


@pytest.mark.parametrize(("label", "rack"), [(None, ""), ("", ""), (" rack-7\n", "rack-7")])
def test_the_rack_is_what_the_machine_is_labelled_with(monkeypatch, label, rack):
    if label is None:
        monkeypatch.delenv("COSMOS_RACK", raising=False)
    else:
        monkeypatch.setenv("COSMOS_RACK", label)
    assert addresses.rack_id() == rack


@pytest.mark.parametrize("label", ["row 3", "rack@home"])
def test_a_label_that_could_not_be_told_apart_is_refused(monkeypatch, label):
    monkeypatch.setenv("COSMOS_RACK", label)
    with pytest.raises(ReplicaError, match=f"COSMOS_RACK='{label}': .* give one word"):
        addresses.rack_id()
