"""What the plan says of a run that other machines can reach."""

from pathlib import Path

import attrs
import pytest

from cosmos_core.config.checks import is_loopback
from cosmos_core.config.job import Job
from cosmos_core.config.schema import (
    AlgorithmConfig,
    ControlConfig,
    DatasetConfig,
    ModelConfig,
    Recipe,
    RunConfig,
    SyncConfig,
)
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import LauncherCapabilities
from cosmos_core.run.planning.preflight import check_exposed, check_keys, exposure
from cosmos_core.transport import key_folder

HERE = LauncherCapabilities()


def make_job(tmp_path: Path, **control) -> Job:
    recipe = Recipe(
        run=RunConfig(name="r", steps=1),
        model=ModelConfig(path="m"),
        algorithm=AlgorithmConfig(plugin="a"),
        dataset=DatasetConfig(plugin="d"),
        control=ControlConfig(**control),
    )
    return Job(
        run_id="r",
        directory=tmp_path / "run",
        recipe_directory=tmp_path,
        recipe=recipe,
        num_train_rows=1,
        num_heldout_rows=0,
        num_evaluation_prompts=0,
        uses_rollouts=True,
        stages=(),
    )


def test_this_machine_alone_needs_no_keys(tmp_path):
    for bind in ["127.0.0.1", "127.3.2.1", "::1", "localhost"]:
        job = make_job(tmp_path, bind=bind)
        check_exposed(job.recipe, HERE)
        check_keys(job)
        assert is_loopback(bind)
        assert exposure(job) == ""
        assert job.keys == tmp_path / "run" / "keys"


def test_others_need_keys_and_the_command_is_named(tmp_path):
    for bind in ["0.0.0.0", "::", "*", "10.0.0.5", "eth0"]:
        with pytest.raises(ConfigError, match=r"control\.bind: other machines can reach .*cosmos keys new"):
            check_exposed(make_job(tmp_path, bind=bind).recipe, HERE)
        check_exposed(make_job(tmp_path, bind=bind, keys="keys").recipe, HERE)
        # What is handed over uses the keys of its folder, whatever its launcher is called.
        check_exposed(make_job(tmp_path, bind=bind).recipe, LauncherCapabilities(submits=True))


def test_keys_are_to_be_there_and_whole(tmp_path):
    job = make_job(tmp_path, bind="10.0.0.5", keys="keys")
    with pytest.raises(ConfigError, match=r"control\.keys: .*controller\.key: no such key; .*cosmos keys new"):
        check_keys(job)
    key_folder.make(tmp_path / "keys", key_folder.USUAL)
    check_keys(job)
    for label in ("policy", "rollout", "operator"):
        key_folder.revoke(tmp_path / "keys", label)
    with pytest.raises(ConfigError, match="nobody is allowed"):
        check_keys(job)


def test_the_plan_says_what_is_not_encrypted(tmp_path):
    job = make_job(tmp_path, bind="10.0.0.5", keys="keys")
    assert "gradients between" in exposure(job)
    assert "sync.transport" not in exposure(job)
    open_weights = attrs.evolve(job.recipe, sync=SyncConfig(transport="gloo"))
    assert "weights (sync.transport 'gloo')" in exposure(attrs.evolve(job, recipe=open_weights))
