"""Each algorithm of this repository has a run that learns: in `docs/papers.md`, and in `benchmarks/presets.py`."""

import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECTS = sorted((ROOT / "plugins" / "algorithms").glob("*/pyproject.toml"))
ALGORITHMS = [
    name
    for project in PROJECTS
    for name in tomllib.loads(project.read_text())["project"]["entry-points"]["cosmos_core.algorithms"]
]


@pytest.fixture(scope="module")
def presets():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return runpy.run_path(str(ROOT / "benchmarks" / "presets.py"))


def test_each_algorithm_has_a_preset_on_a_recipe_that_is_there(presets):
    text = (ROOT / "docs" / "papers.md").read_text().partition("## A run of each algorithm")[2]
    listed = {cell for line in text.splitlines() if line.startswith("| `") for cell in line.split("|")[1].split("`")}
    assert set(ALGORITHMS) <= listed
    assert set(ALGORITHMS) <= presets["PRESETS"].keys()
    for name, preset in presets["PRESETS"].items():
        recipe = tomllib.loads((ROOT / "recipes" / preset.recipe).read_text())
        algorithm = preset.algorithm or recipe["algorithm"]["plugin"]
        assert algorithm in ALGORITHMS
        assert name.startswith(algorithm)


def test_a_measure_is_held_out_or_one_of_the_steps(presets):
    measured = presets["before_and_after"]
    summary = {"heldout_loss_before": 2.0, "heldout_loss_after": None, "measures": {"kl": {"first": 3.0, "last": 1.0}}}
    assert measured(summary, "loss")[0] == 2.0
    assert measured(summary, "loss")[1] != measured(summary, "loss")[1], "what was not measured is no number"
    assert measured(summary, "kl") == (3.0, 1.0)
    with pytest.raises(LookupError, match="no measure 'accuracy', neither held out nor among kl; mend PRESETS"):
        measured(summary, "accuracy")
