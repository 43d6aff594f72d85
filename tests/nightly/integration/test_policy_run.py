"""Real processes: one controller and policy replicas that imitate demonstrations."""

import pytest
import torch

from cosmos_core.plugins.recipe import load_model, selections
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.checkpoints.checkpoint import completed

torch.set_num_threads(1)


@pytest.fixture
def run(processes):
    def whole(job, *, resume_step=None):
        controller = processes.controller(job, resume_step=resume_step)
        checkpoint = [] if resume_step is None else ["--checkpoint", f"{job.checkpoints}/step-{resume_step}"]
        policies = [
            process
            for index in range(job.recipe.policy.replicas)
            for process in processes.policy(job, index, *checkpoint)
        ]
        assert [process.wait(120) for process in (*policies, controller)] == [0] * (len(policies) + 1)

    return whole


def state_of(job, step):
    from cosmos_core.policy.checkpoints.reader import restore
    from cosmos_core.policy.processes.world import single_world
    from cosmos_core.policy.training.setup import StageSettings, make_trainer

    plugins = PluginSet.load(selections(job.recipe, ("model", "algorithm", "dataset")))
    trainer = make_trainer(job, load_model(job, plugins), single_world(), plugins)
    begin = StageSettings(job, plugins, trainer).begin_stage
    begin(0)
    restore(trainer, f"{job.checkpoints}/step-{step}", begin)
    assert trainer.step == step
    return trainer.state()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_has_the_same_weights_resumed_and_in_any_layout(run, imitation, tmp_path):
    whole = imitation(tmp_path / "whole")
    run(whole)
    assert completed(whole.checkpoints) == [4, 8, 12]
    expected = {name: tensor.clone() for name, tensor in state_of(whole, 12).items()}
    run(whole, resume_step=4)
    again = state_of(whole, 12)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())

    for name, overrides in {
        "sharded": ["policy.mesh.dp_shard=2", "policy.replicas=2"],
        "staged": ["policy.mesh.pp=2", "policy.replicas=2"],
    }.items():
        spread = imitation(tmp_path / name, *overrides)
        run(spread)
        assert completed(spread.checkpoints) == [4, 8, 12]
        for key, tensor in state_of(spread, 12).items():
            torch.testing.assert_close(tensor, expected[key], atol=2e-4, rtol=1e-2)
