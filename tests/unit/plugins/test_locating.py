from pathlib import PurePosixPath

import pytest

from cosmos_core.plugins.distributions import exists, find_root

BOMB = "raise RuntimeError('imported')"
MODULES = {
    "acme_p/__init__.py": BOMB,
    "acme_p/deep/er.py": BOMB,
    "acme_m.py": BOMB,
    "acme_n/short/__init__.py": BOMB,
    "acme_n/short/core.py": BOMB,
    "acme_n/lone.py": BOMB,
    "acme_n/in/ner/__init__.py": BOMB,
}


@pytest.fixture
def folder(make_distribution):
    return make_distribution("acme-a", entries={}, modules=MODULES)


def test_the_root_is_what_a_project_has_for_itself(folder):
    for module, root in [
        ("acme_p", "acme_p"),
        ("acme_p.deep.er", "acme_p"),
        ("acme_m", "acme_m.py"),
        ("acme_n.short.core", "acme_n/short"),
        ("acme_n.lone", "acme_n/lone.py"),
        ("acme_n.in.ner", "acme_n/in/ner"),
    ]:
        found = find_root(module)
        assert exists(module)
        assert (found.name, found.path) == (PurePosixPath(root), folder / root)
    assert find_root("acme_p.gone").path == folder / "acme_p"


def test_a_root_is_found_in_each_folder_of_a_namespace_and_in_others(folder, make_distribution):
    other = make_distribution("acme-b", entries={}, modules={"acme_n/long/__init__.py": BOMB})
    assert find_root("acme_n.long").path == other / "acme_n/long"
    assert find_root("acme_n.short").path == folder / "acme_n/short"
    make_distribution("acme-b", entries={}, modules={"acme_p/__init__.py": BOMB})
    assert find_root("acme_p", [str(folder)]).path == folder / "acme_p"
    assert find_root("acme_p", [str(folder / "acme_n")]) is None


def test_what_is_missing_or_has_no_file(folder):
    for module in ["acme_gone", "acme_p.gone", "acme_m.inside", "acme_p..deep", ".acme_p", ""]:
        assert not exists(module)
    for module in ["acme_gone", "acme_n", "sys"]:
        assert find_root(module) is None
