import tomllib
from pathlib import Path

from cosmos_core.plugins.known import KNOWN, known_names
from cosmos_core.protocols import KINDS
from cosmos_core.protocols.provider import entry_point_group

PLUGINS = Path(__file__).parents[3] / "plugins"


def test_every_first_party_plugin_is_known_and_no_other():
    provided = {}
    for file in PLUGINS.glob("*/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        for kind in KINDS:
            for name in project.get("entry-points", {}).get(entry_point_group(kind), {}):
                provided[kind, name] = project["name"]
    assert provided == KNOWN


def test_names_of_a_kind():
    assert known_names("dataset") == [
        "arithmetic",
        "curriculum",
        "huggingface",
        "jsonl",
        "mixture",
        "reason",
        "reason-mock",
        "shapes",
        "world-folder",
        "world-mock",
        "world-prompts",
        "world-webdataset",
    ]
