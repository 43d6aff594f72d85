import json
from pathlib import PurePosixPath

import pytest

from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.distributions import is_source
from cosmos_core.plugins.manifest import manifest

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


def test_the_hash_is_that_of_the_code_with_or_without_a_record(folder):
    before = entry()["sha256"]
    (next(folder.glob("*.dist-info")) / "INSTALLER").write_text("pip")
    assert entry()["sha256"] == before
    (folder / "acme_a" / "core.py").write_text("x = 2\n")
    assert entry()["sha256"] != before
    before = entry()["sha256"]
    (folder / "acme_a-1.0.dist-info" / "RECORD").unlink()
    assert entry()["sha256"] == before
    make_editable(folder)
    (folder / "acme_a" / "__pycache__").mkdir()
    (folder / "acme_a" / "__pycache__" / "core.pyc").write_bytes(b"1")
    assert entry()["sha256"] == before
    (folder / "acme_a" / "core.py").write_text("x = 3\n")
    assert entry()["sha256"] != before


def test_a_single_module_can_be_editable(make_distribution):
    folder = make_distribution("acme-a", entries={"reward/short": "acme_m"}, modules={"acme_m.py": "x = 1\n"})
    before = entry()["sha256"]
    make_editable(folder)
    assert entry()["sha256"] == before


def test_missing_files_are_named(folder):
    (folder / "acme_a" / "core.py").unlink()
    with pytest.raises(PluginBrokenError, match=r"core\.py of acme-a cannot be read.*reinstall"):
        entry()
    (folder / "acme_a" / "__init__.py").unlink()
    (folder / "acme_a").rmdir()
    with pytest.raises(PluginBrokenError, match="reward plugin 'short': no file of acme-a is found; reinstall it"):
        entry()


def test_the_hash_is_over_the_packages_of_all_entry_points_of_the_distribution(make_distribution):
    for is_editable in [False, True]:
        folder = make_distribution(
            "acme-a",
            entries={"reward/short": "acme_a.core", "dataset/rows": "acme_b", "dataset/gone": "acme_gone"},
            modules={**MODULES, "acme_b/__init__.py": "", "beside.py": ""},
        )
        if is_editable:
            make_editable(folder)
        hashes = [entry()["sha256"]]
        for file in ("acme_a/core.py", "acme_b/__init__.py", "beside.py"):
            (folder / file).write_text("y = 1\n")
            hashes.append(entry()["sha256"])
        assert len(set(hashes)) == 3
        assert hashes[2] == hashes[3]


def test_a_namespace_shared_with_others_has_the_hash_of_its_own_part(make_distribution):
    modules = {"acme_n/short/__init__.py": "", "acme_n/short/core.py": ""}
    folder = make_distribution("acme-a", entries={"reward/short": "acme_n.short.core"}, modules=modules)
    before = entry()["sha256"]
    make_editable(folder)
    assert entry()["sha256"] == before
    make_distribution("acme-b", entries={}, modules={"acme_n/long/__init__.py": ""})
    (folder / "acme_n" / "other.py").write_text("")
    assert entry()["sha256"] == before
    (folder / "acme_n" / "short" / "core.py").write_text("x = 2\n")
    assert entry()["sha256"] != before


def test_a_record_that_names_what_cannot_be_is_refused(folder):
    with (folder / "acme_a-1.0.dist-info" / "RECORD").open("ab") as record:
        record.write(b"acme_a/Ren\xe9.py,,\n")
    with pytest.raises(PluginBrokenError, match=r"Ren\ufffd\.py of acme-a cannot be read"):
        entry()
    for line in [",,", "/etc/passwd,,", "acme_a/../../x.py,,", "acme_a/a\0b.py,,"]:
        with (folder / "acme_a-1.0.dist-info" / "RECORD").open("a") as record:
            record.write(f"\n{line}\n")
        with pytest.raises(PluginBrokenError, match=r"its RECORD names a file .*; reinstall it"):
            entry()


def test_the_core_itself_has_a_hash():
    records = [record for record in discover() if record.distribution == "cosmos-core"]
    assert len({each["sha256"] for each in manifest(records)}) == 1


def test_recipes_that_ship_with_the_core_are_no_code():
    assert is_source(PurePosixPath("cosmos_core/run/resume.py"))
    assert not is_source(PurePosixPath("cosmos_core/recipes/arithmetic.toml"))
