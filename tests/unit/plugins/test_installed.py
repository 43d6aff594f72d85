import importlib.metadata

import pytest

from cosmos_core.plugins.distributions import distribution, distributions


@pytest.fixture
def info(make_distribution):
    return make_distribution("acme-a", entries={"reward/short": "acme_a"}) / "acme_a-1.0.dist-info"


def test_a_distribution_is_what_the_standard_library_makes_of_it(info):
    ours, theirs = distribution("Acme_A"), importlib.metadata.distribution("acme-a")
    assert (ours.name, ours.version, ours.requires) == (theirs.name, theirs.version, theirs.requires)
    assert list(ours.entry_points) == list(theirs.entry_points)
    assert ours.locate_file("x") == theirs.locate_file("x")
    assert [each.name for each in distributions([str(info.parent)])] == ["acme-a"]


def test_a_file_that_is_not_utf_8_or_missing_breaks_nothing(info):
    with (info / "METADATA").open("ab") as file:
        file.write(b"Author: Ren\xe9\r\nRequires-Dist: numpy\n")
    assert distribution("acme-a").metadata["Author"] == "Ren\ufffd"
    assert distribution("acme-a").requires == ["cosmos-core>=0.1", "numpy"]
    (info / "entry_points.txt").unlink()
    (info / "entry_points.txt").symlink_to("entry_points.txt")
    assert distribution("acme-a").read_text("entry_points.txt") is None
