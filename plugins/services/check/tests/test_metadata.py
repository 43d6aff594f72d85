import importlib.metadata
import json
from pathlib import Path

import attrs
import pytest

from cosmos_core.plugins.discovery import discover
from cosmos_service_check.examination import check_compatibility, check_entry_points, check_files, check_metadata
from cosmos_service_check.subject import Subject

COMPLETE = ("Summary: Short.", "License-Expression: MIT", "Requires-Python: >=3.11", "", "About it.")


@pytest.fixture
def make_subject(make_distribution):
    """An installed distribution with more lines of metadata, as a subject."""

    def make(*lines, name="cosmos-reward-a", modules=None, requires=("cosmos-core>=0.1,<0.2",), entry="acme_a"):
        modules = modules or {"acme_a/__init__.py": "", "acme_a/py.typed": ""}
        entries = f"[cosmos_core.rewards]\na = {entry}\n"
        folder = make_distribution(name, entries=entries, modules=modules, requires=requires)
        file = next(folder.glob("*.dist-info")) / "METADATA"
        file.write_text(file.read_text() + "".join(f"{line}\n" for line in lines))
        records = [record for record in discover() if record.distribution == name]
        return Subject(distribution=importlib.metadata.distribution(name), records=records)

    return make


def found(check):
    return [(finding.level, finding.text) for finding in check.findings]


def test_nothing_is_wrong_with_complete_metadata(make_subject):
    subject = make_subject(*COMPLETE)
    for check in (check_metadata, check_compatibility, check_entry_points, check_files):
        assert check(subject).status == "ok"
        assert not found(check(subject))


def test_what_is_missing_is_named(make_subject):
    for lines, level, message in [
        (COMPLETE[1:], "warning", "it has no summary"),
        (COMPLETE[:3], "warning", "it has no description"),
        (("Summary: Short.", *COMPLETE[2:]), "fault", "it has no licence, so nobody may use it"),
        ((*COMPLETE[:2], *COMPLETE[3:]), "fault", "it does not say which Pythons it is for; add requires-python"),
        ((*COMPLETE[:2], "Requires-Python: <3", *COMPLETE[3:]), "fault", "it requires Python <3, this is 3."),
        ((*COMPLETE[:2], "Requires-Python: new", *COMPLETE[3:]), "fault", "'new', which is no version specifier"),
    ]:
        ((seen, text),) = found(check_metadata(make_subject(*lines)))
        assert (seen, message in text) == (level, True), text
    ((level, text),) = found(check_metadata(make_subject(*COMPLETE, name="acme")))
    assert (level, text.partition(";")[0]) == ("note", "it is named acme")
    assert "cosmos-reward-a" in text


def test_the_core_must_be_required_and_fit(make_subject):
    for requires, wanted, message in [
        ((), "fault", "it does not require cosmos-core"),
        (("cosmos-core>=99,<100",), "fault", "it requires cosmos-core<100,>=99, this is cosmos-core"),
        (("cosmos-core>=0.1,<1",), "warning", "which admits 0.2, a release that it cannot have been tried with"),
    ]:
        ((level, text),) = found(check_compatibility(make_subject(requires=requires)))
        assert (level, message in text) == (wanted, True), text


def test_what_no_recipe_can_select_is_named(make_subject, make_distribution):
    for changed, message in [
        ({"entry": "acme_gone"}, "its module acme_gone does not exist"),
        (
            {"requires": ("cosmos-core>=0.1,<0.2", "notthere", "no name!")},
            "its metadata has a malformed requirement, 'no name!'",
        ),
    ]:
        subject = make_subject(**changed)
        assert found(check_entry_points(subject)) == [("fault", f"reward a: {message}")]
        assert not found(check_compatibility(subject))
    make_distribution("acme-b", entries="[cosmos_core.rewards]\na = acme_b\n", modules={"acme_b.py": ""})
    ((level, text),) = found(check_entry_points(make_subject()))
    assert level == "warning"
    assert "select one as DISTRIBUTION:a" in text


def test_an_installation_that_is_behind_its_project_is_told_once(make_subject):
    subject = attrs.evolve(make_subject(), faults=("pyproject.toml has version 1.1",))
    assert found(check_entry_points(subject)) == [("fault", "pyproject.toml has version 1.1")]
    assert not found(check_files(subject))


def test_files_stay_in_packages_of_their_own(make_subject, make_distribution):
    make_distribution("acme-b", entries="", modules={"acme_b/__init__.py": ""})
    for file, message in [
        ("acme_b/more.py", "acme_b/more.py lies in acme_b, which belongs to acme-b"),
        ("conftest.py", "conftest.py would lie beside the packages of all other projects"),
    ]:
        modules = {"acme_a/__init__.py": "", "acme_a/py.typed": "", file: ""}
        ((level, text),) = found(check_files(make_subject(modules=modules)))
        assert (level, message in text) == ("fault", True), text
    subject = make_subject()
    subject.distribution.locate_file("cosmos_reward_a-1.0.dist-info/RECORD").write_text(",,\n")
    ((level, text),) = found(check_files(subject))
    assert (level, text) == ("fault", "cosmos-reward-a: its RECORD names a file ''; reinstall it")


def test_py_typed_is_looked_for_where_type_checkers_do(make_subject):
    origin = {"url": Path.cwd().as_uri(), "dir_info": {"editable": True}}
    for entry, modules, message in [
        (
            "acme_a",
            {"acme_a.py": ""},
            "annotations of acme_a.py; make the module a package with an empty file py.typed",
        ),
        ("acme_a", {"acme_a/__init__.py": ""}, "acme_a/py.typed is missing, so type checkers ignore"),
        ("acme_n.a.reward", {"acme_n/a/__init__.py": "", "acme_n/a/py.typed": "", "acme_n/a/reward.py": ""}, ""),
        ("acme_n.a", {"acme_n/a/__init__.py": "", "acme_n/py.typed": ""}, "acme_n/a/py.typed is missing"),
        (
            "acme_n.a",
            {"acme_n/a.py": ""},
            "acme_n/a/py.typed is missing, so type checkers ignore the annotations of acme_n/a.py; make",
        ),
    ]:
        subject = make_subject(entry=entry, modules=modules)
        for direct_url in ["{}", json.dumps(origin)]:
            subject.distribution.locate_file("cosmos_reward_a-1.0.dist-info/direct_url.json").write_text(direct_url)
            faults = [text for level, text in found(check_files(subject)) if level == "fault"]
            assert len(faults) == bool(message), (entry, modules, faults)
            assert message in "".join(faults)


def test_what_is_not_installed_is_nobodys_fault(make_subject):
    requires = ("cosmos-core>=0.1,<0.2", "notthere[fast]>=1; python_version > '3'", "attrs<1", "gone; extra == 'more'")
    subject = make_subject(requires=requires, entry="acme_a [more]")
    assert found(check_compatibility(subject)) == [
        ("not run", "notthere is not installed; pip install 'notthere[fast]>=1'"),
        ("not run", f"attrs<1 is required, {importlib.metadata.version('attrs')} is installed; pip install 'attrs<1'"),
        ("not run", "gone is not installed; pip install gone"),
    ]
    assert not found(check_entry_points(subject))
