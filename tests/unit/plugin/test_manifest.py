import json

import pytest

from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugin.discovery import discover
from cosmos_core.plugin.manifest import manifest

MODULES = {"acme_a/__init__.py": "", "acme_a/core.py": "x = 1\n"}


def entry() -> dict:
    (result,) = manifest([record for record in discover("reward") if record.name == "short"])
    return result


def make_editable(folder) -> None:
    """What `pip install -e` leaves: a record without the code, and the origin."""
    (info,) = folder.glob("*.dist-info")
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))
    (info / "RECORD").write_text("_acme.pth,,\nacme_a-1.0.dist-info/METADATA,,\n")


@pytest.fixture
def folder(make_distribution):
    return make_distribution("acme-a", entries={"reward/short": "acme_a.core"}, modules=MODULES)


def test_an_entry_names_the_plugin_its_distribution_and_a_hash(folder):
    result = entry()
    digest = result.pop("sha256")
    assert len(digest) == 64
    assert result == {
        "kind": "reward",
        "name": "short",
        "distribution": "acme-a",
        "version": "1.0",
        "module": "acme_a.core",
    }


def test_the_hash_follows_the_code_and_nothing_else(folder):
    before = entry()["sha256"]
    (next(folder.glob("*.dist-info")) / "INSTALLER").write_text("pip")
    assert entry()["sha256"] == before
    (folder / "acme_a" / "core.py").write_text("x = 2\n")
    assert entry()["sha256"] != before


def test_an_editable_installation_of_the_same_code_has_the_same_hash(folder):
    before = entry()["sha256"]
    make_editable(folder)
    (folder / "acme_a" / "__pycache__").mkdir()
    (folder / "acme_a" / "__pycache__" / "core.pyc").write_bytes(b"1")
    assert entry()["sha256"] == before
    (folder / "acme_a" / "core.py").write_text("x = 2\n")
    assert entry()["sha256"] != before


def test_a_single_module_can_be_editable(make_distribution):
    folder = make_distribution("acme-a", entries={"reward/short": "acme_m"}, modules={"acme_m.py": "x = 1\n"})
    before = entry()["sha256"]
    make_editable(folder)
    assert entry()["sha256"] == before


def test_a_missing_file_is_named(folder):
    (folder / "acme_a" / "core.py").unlink()
    with pytest.raises(PluginBrokenError, match=r"core\.py of acme-a cannot be read.*reinstall"):
        entry()


def test_the_core_itself_has_a_hash():
    records = [record for record in discover() if record.distribution == "cosmos-core"]
    assert len({each["sha256"] for each in manifest(records)}) == 1
