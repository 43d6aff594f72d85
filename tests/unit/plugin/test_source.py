import importlib.metadata
import json

import pytest

from cosmos_core.plugin.source import editable_folder, licence, source


@pytest.fixture
def dist(make_distribution):
    """Make a distribution with more lines of metadata."""

    def make(*lines: str):
        folder = make_distribution("acme-a", entries={}, modules={"acme_a.py": ""})
        file = folder / "acme_a-1.0.dist-info" / "METADATA"
        file.write_text(file.read_text() + "".join(f"{line}\n" for line in lines))
        return importlib.metadata.distribution("acme-a")

    return make


def test_a_source_is_what_the_metadata_says(dist, tmp_path):
    found = source(dist("Summary: Short.", "Project-URL: Docs, https://d", "Project-URL: Repository, https://r"))
    assert (found.summary, found.home_page, found.licence) == ("Short.", "https://r", "")
    assert (found.location, found.editable) == (tmp_path / "site-acme-a", None)


@pytest.mark.parametrize(
    "line", ["License-Expression: MIT", "License: MIT", "Classifier: License :: OSI Approved :: MIT"]
)
def test_each_way_to_say_a_licence(dist, line):
    assert licence(dist(line)) == "MIT"


def test_an_editable_installation_names_its_folder(dist, tmp_path):
    made = dist()
    project = tmp_path / "my project"
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (tmp_path / "site-acme-a" / "acme_a-1.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    assert editable_folder(made) == project
