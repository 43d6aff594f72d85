import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.discovery import discover
from cosmos_core.run import provenance

RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic.toml"
CHANGED = "Changed since the run's last session: "
MODULE = "from cosmos_core.protocols import Provider, hookimpl\n"


@pytest.fixture
def plugin(make_distribution):
    site = make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": MODULE})
    return site / "acme_a.py"


def records():
    return [choose("reward", "short", discover())]


@pytest.fixture
def run(plugin, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "manifest.json").write_text(json.dumps(provenance.made_with(records())))
    return directory


def test_the_same_code_is_no_difference_and_other_code_is_told_once(run, plugin):
    # The same code is no difference and each session is recorded.
    assert provenance.resumed_with(run, records()) == []
    assert provenance.resumed_with(run, records()) == []
    recorded = json.loads((run / "manifest.json").read_text())
    assert len(recorded["resumed"]) == 2
    assert recorded["resumed"][0]["plugins"] == recorded["plugins"]

    # Other code is told once.
    plugin.write_text(MODULE + "# changed\n")
    assert provenance.resumed_with(run, records()) == [f"{CHANGED}acme-a 1.0 has other code than before"]
    assert provenance.resumed_with(run, records()) == []

    # The manifest names plugins and machine.
    made = provenance.made_with(records())
    assert [each["distribution"] for each in made["plugins"]] == ["acme-a"]
    assert {"cosmos_core", "python", "host", "git_commit", "created"} <= made.keys()


def test_assets_that_changed_since_the_run_was_made_are_refused(run):
    (run / "assets").mkdir()
    (run / "assets" / "tokenizer.json").write_text("{}")
    (run / "manifest.json").write_text(json.dumps(provenance.made_with(records(), run / "assets")))
    assert provenance.resumed_with(run, records()) == []
    (run / "assets" / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"assets/tokenizer\.json is not what the run was made with"):
        provenance.resumed_with(run, records())
    (run / "assets" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"assets/tokenizer\.json is missing; restore it"):
        provenance.joined_with(run, records())


def test_differences_are_told_and_damage_refused(run):
    # Versions comings and goings are told.
    path = run / "manifest.json"
    recorded = json.loads(path.read_text())
    gone = {**recorded["plugins"][0], "distribution": "acme-gone"}
    recorded["plugins"][0]["version"] = "0.9"
    path.write_text(json.dumps({**recorded, "plugins": [*recorded["plugins"], gone], "cosmos_core": "0.0"}))
    differences = provenance.resumed_with(run, records())
    assert differences[0].startswith(f"{CHANGED}cosmos-core was 0.0, is ")
    assert differences[1:] == [f"{CHANGED}acme-a was 0.9, is 1.0", f"{CHANGED}acme-gone went"]

    # A missing or damaged manifest is refused.
    for content in [None, "{", "[]", '{"plugins": [{}]}']:
        path = run / "manifest.json"
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(ConfigError, match=r"manifest\.json: missing or damaged"):
            provenance.resumed_with(run, records())


def test_a_file_that_cannot_be_read_silences_no_other(tmp_path):
    entries, copies = [], []
    for name, version in (("a", "0" * 12), ("b", "1" * 12), ("c", "2" * 12)):
        (tmp_path / f"{name}.py").write_text("new")
        entries.append({"module": f"{tmp_path}/{name}.py:{name}", "version": version})
        copies.append(f"{{plugin='{tmp_path}/run/plugins/{version}/{name}.py:{name}'}}")
    (tmp_path / "a.py").unlink()
    (tmp_path / "a.py").symlink_to("/proc/self/mem")
    recorded = {"plugins": entries, "created": "then", "resumed": [{"plugins": [{}]}, []]}
    (tmp_path / "manifest.json").write_text(json.dumps(recorded))
    parts = f"dataset={{plugin='mixture', options={{parts=[{copies[2]}]}}}}"
    recipe = load_recipe(RECIPE, overrides=[f"reward=[{copies[0]}, {copies[1]}]", parts])
    job = SimpleNamespace(directory=tmp_path, recipe=recipe)
    (label, setting, told), (_, none, of_part) = provenance.sources(job)
    assert (label, setting) == ("b", f"--set reward.1.plugin={tmp_path}/b.py:b")
    assert "reward b has changed: the run goes on with its copy of then; to take the new one: --set" in told
    assert (
        of_part
        == "The file of dataset c has changed: the run goes on with its copy of then; a new run takes the new one"
    )
    assert not none
    for damage in ("[]", "{", '{"resumed": 1}'):
        (tmp_path / "manifest.json").write_text(damage)
        assert [*provenance.sources(job)] == []
