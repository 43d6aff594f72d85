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
from cosmos_service_tools import allow_list

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


def test_keys_are_needed_where_others_reach_the_run(tmp_path):
    # This machine alone needs no keys.
    for bind in ["127.0.0.1", "127.3.2.1", "::1", "localhost"]:
        job = make_job(tmp_path, bind=bind)
        check_exposed(job.recipe, HERE)
        check_keys(job)
        assert is_loopback(bind)
        assert exposure(job) == ""
        assert job.keys == tmp_path / "run" / "keys"

    # Others need keys and the command is named.
    for bind in ["0.0.0.0", "::", "*", "10.0.0.5", "eth0"]:
        with pytest.raises(ConfigError, match=r"control\.bind: other machines can reach .*cosmos keys new"):
            check_exposed(make_job(tmp_path, bind=bind).recipe, HERE)
        check_exposed(make_job(tmp_path, bind=bind, keys="keys").recipe, HERE)
        # What is handed over uses the keys of its folder, whatever its launcher is called.
        check_exposed(make_job(tmp_path, bind=bind).recipe, LauncherCapabilities(submits=True))

    # The plan says what is not encrypted.
    job = make_job(tmp_path, bind="10.0.0.5", keys="keys")
    assert "gradients between" in exposure(job)
    assert "sync.transport" not in exposure(job)
    open_weights = attrs.evolve(job.recipe, sync=SyncConfig(transport="gloo"))
    assert "weights (sync.transport 'gloo')" in exposure(attrs.evolve(job, recipe=open_weights))
    # Keys are to be there and whole.
    job = make_job(tmp_path, bind="10.0.0.5", keys="keys")
    with pytest.raises(ConfigError, match=r"control\.keys: .*controller\.key: no such key; .*cosmos keys new"):
        check_keys(job)
    key_folder.make(tmp_path / "keys", key_folder.USUAL)
    check_keys(job)
    for label in ("policy", "rollout", "operator"):
        allow_list.revoke(tmp_path / "keys", label)
    with pytest.raises(ConfigError, match="nobody is allowed"):
        check_keys(job)
