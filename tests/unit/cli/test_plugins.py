import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cosmos_core.cli.plugins import app

COUNTED = """
import email, json, sys, time

parse, parsed = email.message_from_string, []

def counted(text, *arguments, **named):
    message = parse(text, *arguments, **named)
    parsed.append(message["Name"])
    return message

email.message_from_string = counted
began = time.perf_counter()
from cosmos_core.cli.plugins import app
app(["list", "--json"], standalone_mode=False)
seconds = time.perf_counter() - began
heavy = [name for name in sys.modules if name.startswith("acme") or name in ("torch", "transformers", "rich", "zmq")]
print(json.dumps({"parsed": parsed, "heavy": heavy, "seconds": seconds}), file=sys.stderr)
"""


@pytest.fixture
def run():
    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False, terminal_width=200)
        assert result.exit_code == 0, result.output
        return result.output

    return invoke


@pytest.fixture
def short(make_distribution):
    make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": ""})


def test_the_list_has_every_plugin_with_its_status(run, short, make_distribution, monkeypatch):
    make_distribution("acme-b", entries={"reward/bad": "acme_gone"})
    lines = run("list").splitlines()
    assert lines[0].split() == ["KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS"]
    rows = [line.split() for line in lines]
    assert ["reward", "short", "acme-a", "1.0", "ok"] in rows
    assert ["reward", "bad", "acme-b", "1.0", "broken"] in rows
    assert "reward bad: its module acme_gone does not exist" in lines

    # The list can be of one kind and json.
    listed = json.loads(run("list", "--kind", "reward", "--json"))
    assert {each["kind"] for each in listed} == {"reward"}
    assert {
        "kind": "reward",
        "name": "short",
        "distribution": "acme-a",
        "version": "1.0",
        "module": "acme_a",
        "status": "ok",
        "problem": "",
    } in listed

    # A wrong kind is refused.
    result = CliRunner().invoke(app, ["list", "--kind", "rewards"])
    assert result.exit_code == 2

    # Metadata that cannot be decoded does not break the list.
    folder = make_distribution("acme-b", entries={})
    (folder / "acme_b-1.0.dist-info" / "METADATA").write_bytes(b"Name: acme-b\nVersion: 1.0\nAuthor: Ren\xe9\n")
    assert "reward       short" in run("list")

    # The list says that plugins are hidden.
    monkeypatch.setenv("COSMOS_DISABLE_PLUGIN_AUTOLOAD", "1")
    result = CliRunner().invoke(app, ["list"])
    assert "only cosmos-core's own plugins are seen" in result.stderr
    assert "short" not in result.stdout


def test_a_misspelt_group_is_listed_with_the_right_one(run, make_distribution):
    make_distribution("acme-a", entries="[cosmos_core.reward]\nshort = acme_a\n", modules={"acme_a.py": ""})
    listed = run("list")
    assert ["reward", "short", "acme-a", "1.0", "invalid"] in [line.split() for line in listed.splitlines()]
    assert "reward short: its entry-point group 'cosmos_core.reward' is unknown to the core" in listed


def test_a_list_of_thirty_reads_their_metadata_once_and_imports_none(make_distribution):
    folders = []
    for index in range(30):
        module = f"acme_{index}"
        modules = {f"{module}.py": "raise RuntimeError('imported')"}
        folders.append(make_distribution(f"acme-{index}", entries={f"reward/r{index}": module}, modules=modules))
        folders.append(make_distribution(f"other-{index}", entries={}, modules={f"other_{index}.py": ""}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", COUNTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    listed = {each["distribution"] for each in json.loads(done.stdout)}
    told = json.loads(done.stderr)
    assert {f"acme-{index}" for index in range(30)} <= listed
    assert sorted(told["parsed"]) == sorted(listed)
    assert told["heavy"] == []
    assert told["seconds"] < 10, "benchmarks/cli.py measures: it should be some 0.3"
