from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.run.planning.changes import changed


@pytest.fixture
def recipe(job):
    return job.recipe


def test_what_a_result_does_not_depend_on_may_change(recipe):
    overrides = ["run.steps=9", "policy.checkpoint.keep=7", "tracking.hooks=['mlflow']", "control.port=4000"]
    new, changes = changed(recipe, overrides, Path())
    assert (new.run.steps, new.policy.checkpoint.keep) == (9, 7)
    assert (new.tracking.hooks, new.control.port) == (("mlflow",), 4000)
    assert [str(change) for change in changes] == [
        "run.steps was 6, is 9",
        f"policy.checkpoint.keep was {recipe.policy.checkpoint.keep}, is 7",
        'tracking.hooks was [], is ["mlflow"]',
        "control.port was 0, is 4000",
    ]

    # The layout may change.
    new, changes = changed(recipe, ["policy.mesh.pp=2", "policy.parallel.schedule='zero-bubble'"], Path())
    assert (new.policy.mesh.pp, new.policy.parallel.schedule) == (2, "zero-bubble")
    assert len(changes) == 2

    # How weights travel may change and is checked again.
    new, changes = changed(recipe, ["sync.transport='disk'", "sync.directory='/elsewhere'", "run.steps=9"], Path())
    assert (new.sync.transport, new.sync.directory) == ("disk", "/elsewhere")
    assert {change.key: change.is_to_be_checked for change in changes} == {
        "run.steps": False,
        "sync.transport": True,
        "sync.directory": True,
    }

    # Nothing changes without overrides or by the same value.
    assert changed(recipe, [], Path()) == (recipe, [])
    assert changed(recipe, ["policy.prompts_per_step=2", "run.steps=6"], Path()) == (recipe, [])


def test_what_it_depends_on_is_refused_with_what_to_do(recipe):
    for override, key in [
        ("evaluation.prompts=3", "evaluation.prompts"),
        ("run.seed=4", "run.seed"),
        ("reward.0.weight=2.0", "reward.0.weight"),
        ("reward.0.plugin=other", "reward.0.plugin"),
        ("policy.checkpoint.url='memory://x'", "policy.checkpoint.url"),
    ]:
        with pytest.raises(ConfigError, match=rf"--set {key}: a run that goes on keeps .*cosmos export.* run\.steps, "):
            changed(recipe, ["run.steps=9", override], Path())

    # What may change once the run goes on has a short answer.
    with pytest.raises(ConfigError, match=r"^--set policy\.optimizer\.lr: resume without it, then `cosmos set policy"):
        changed(recipe, ["policy.optimizer.lr=1.0"], Path())

    # An override makes a recipe like any other.
    with pytest.raises(ConfigError, match="did you mean steps"):
        changed(recipe, ["run.stepps=9"], Path())
