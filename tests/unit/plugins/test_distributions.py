import importlib.metadata
import json

import pytest

from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugins.distributions import editable_folder, licence, recorded_files


@pytest.fixture
def dist(make_distribution):
    """Make a distribution with more lines of metadata."""

    def make(*lines: str):
        folder = make_distribution("acme-a", entries={}, modules={"acme_a.py": ""})
        file = folder / "acme_a-1.0.dist-info" / "METADATA"
        file.write_text(file.read_text() + "".join(f"{line}\n" for line in lines))
        return importlib.metadata.distribution("acme-a")

    return make


def test_a_licence_is_what_the_metadata_says(dist):
    assert licence(dist()) == ""
    for line in ["License-Expression: MIT", "License: MIT", "Classifier: License :: OSI Approved :: MIT"]:
        assert licence(dist(line)) == "MIT"


def test_an_editable_installation_names_its_folder(dist, tmp_path):
    made = dist()
    project = tmp_path / "my project"
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (tmp_path / "site-acme-a" / "acme_a-1.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    assert editable_folder(made) == project


def test_an_odd_origin_is_refused(dist, tmp_path):
    for origin in [
        "[]",
        "{",
        "3",
        '{"dir_info": 3}',
        '{"dir_info": {"editable": true}}',
        '{"dir_info": {"editable": true}, "url": 4}',
    ]:
        made = dist()
        (tmp_path / "site-acme-a" / "acme_a-1.0.dist-info" / "direct_url.json").write_text(origin)
        with pytest.raises(
            PluginBrokenError, match=r"acme-a: its direct_url\.json is not as pip writes it .*reinstall it"
        ):
            editable_folder(made)


def recorded(made, record: bytes) -> list[str]:
    (made.locate_file("acme_a-1.0.dist-info") / "RECORD").write_bytes(record)
    return [file.as_posix() for file in recorded_files(made)]


def test_the_record_names_what_lies_among_the_packages_of_all_others(dist):
    for record, files in [
        (b"", []),
        (b"\nacme_a.py,,\n\n", ["acme_a.py"]),
        (b"acme/b.py,sha256=x,3\r\nacme/a.py,,\r\n", ["acme/b.py", "acme/a.py"]),
        (b"../../../bin/acme,,\nacme_a-1.0.dist-info/RECORD,,\nacme/__pycache__/a.pyc,,\na.pth,,\n", ["a.pth"]),
        (b"acme/Ren\xe9.py,,\n", ["acme/Ren\ufffd.py"]),
        (b'"acme/a,b.py",,\n', ["acme/a,b.py"]),
    ]:
        assert recorded(dist(), record) == files


def test_a_record_that_no_installer_writes_is_refused(dist):
    for name in [b"", b".", b"..", b"acme/a\0b.py", b"/etc/passwd", b"acme/../../x.py", b"../acme/../x"]:
        with pytest.raises(PluginBrokenError, match=r"acme-a: its RECORD names a file .*; reinstall it"):
            recorded(dist(), name + b",,\n")
    with pytest.raises(PluginBrokenError, match="acme-a: its RECORD cannot be read: field larger"):
        recorded(dist(), b"x" * 200_000)
