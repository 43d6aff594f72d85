"""What the README says of citing, and the script that makes GSM8K's files."""

import json
import re
import runpy
import sys
import tomllib
from pathlib import Path

import datasets
import yaml

from cosmos_core.config.loading import load_recipe

ROOT = Path(__file__).parents[3]


def test_the_citation_is_of_this_version_and_one_with_the_readmes():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
    entry = re.search(r"```bibtex\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    told = dict(re.findall(r"^  (\w+) += \{+(.*?)\}+,$", entry, re.MULTILINE))
    assert told == {
        "author": citation["authors"][0]["name"],
        "title": citation["title"],
        "version": citation["version"],
        "year": str(citation["date-released"].year),
    }


def test_the_script_writes_the_files_that_the_recipe_reads(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"question": "Wie viele Äpfel? - 2", "answer": "#### 2"}] * 2)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sys, "argv", ["gsm8k.py", str(tmp_path / "gsm8k")])
    runpy.run_path(str(ROOT / "recipes" / "data" / "gsm8k.py"), run_name="__main__")
    assert asked == [("openai/gsm8k", "main", "train[:2000]"), ("openai/gsm8k", "main", "test")]
    options = load_recipe(ROOT / "recipes" / "gsm8k.toml").dataset.options
    for split in ("train", "heldout"):
        path = tmp_path / options[split].partition("}/")[2]
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"question": "Wie viele Äpfel? - 2", "answer": "#### 2"}
        ] * 2
