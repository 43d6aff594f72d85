"""Optimizers by hand and against torch's own; of sharded parameters, see `checkpoints/test_layouts`."""

import pytest
import torch

from cosmos_core.config.schema import OptimizerConfig
from cosmos_core.policy.training.optimizers import Optimizer, learning_rate

torch.set_num_threads(1)


def test_the_first_step_by_hand():
    """With bias correction, Adam's first step is lr · sign(g) (up to epsilon), after decay by lr · wd."""
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight.data[:] = torch.tensor([[1.0, -2.0]])
    optimizer = Optimizer(module, OptimizerConfig(weight_decay=0.5))
    module.weight.grad = torch.tensor([[3.0, -4.0]])
    optimizer.step(0.1, 0.5)
    torch.testing.assert_close(module.weight.data, torch.tensor([[1.0 * 0.95 - 0.1, -2.0 * 0.95 + 0.1]]))


def test_the_state_is_there_before_the_first_step_and_can_be_written_into():
    module, twin = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    twin.load_state_dict(module.state_dict())
    first, second = Optimizer(module, OptimizerConfig(lr=0.1)), Optimizer(twin, OptimizerConfig(lr=0.1))
    assert list(first.state()) == [f"{p}.{k}" for p in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step(0.1, 0.5)
    assert first.state()["weight.step"].item() == 1.0
    twin.load_state_dict(module.state_dict())
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    for each in (module, twin):
        for parameter in each.parameters():
            parameter.grad = torch.full_like(parameter, -0.5)
    first.step(0.2, 0.0)
    second.step(0.2, 0.0)
    assert torch.equal(module.weight, twin.weight)


def test_muon_is_that_of_torch_on_matrices_of_layers_and_adamw_elsewhere():
    made, twin = (
        torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "layers": torch.nn.ModuleList([torch.nn.Linear(4, 6)])})
        for _ in range(2)
    )
    twin.load_state_dict(made.state_dict())
    optimizer = Optimizer(made, OptimizerConfig(kind="muon", momentum=0.8, eps=1e-6))
    matrix, *others = twin["layers"][0].weight, twin["layers"][0].bias, twin["embed"].weight
    theirs = [
        torch.optim.Muon([matrix], lr=0.1, momentum=0.8, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.1, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.3, fused=True),
    ]
    for _ in range(3):
        for own, other in zip(made.parameters(), twin.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        optimizer.step(0.1, 0.3)
        for each in theirs:
            each.step()
    for own, other in zip(made.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other)
    keys = {name.rpartition(".")[0]: [] for name in optimizer.state()}
    for name in optimizer.state():
        keys[name.rpartition(".")[0]].append(name.rpartition(".")[2])
    adamw = ["step", "exp_avg", "exp_avg_sq"]
    assert keys == {"embed.weight": adamw, "layers.0.weight": ["momentum_buffer"], "layers.0.bias": adamw}


def rates(steps, **config):
    return [learning_rate(OptimizerConfig(lr=1.0, **config), step=k, steps=steps) for k in range(1, steps + 1)]


def test_constant():
    assert rates(3) == [1.0, 1.0, 1.0]


def test_constant_with_warmup():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_the_final_ratio_at_the_last_step():
    assert rates(5, schedule="linear", warmup_steps=1, final_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine():
    # Halfway between peak and end at half time: (1 + 0.1) / 2; at a quarter: 0.1 + 0.9 (1 + cos 45°) / 2.
    expected = [0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466, 0.1]
    assert rates(4, schedule="cosine") == pytest.approx(expected)


def test_the_warm_up_of_the_demo():
    config = OptimizerConfig(lr=5e-3, schedule="linear", warmup_steps=20)
    assert learning_rate(config, step=1, steps=900) == pytest.approx(2.5e-4)
    assert learning_rate(config, step=20, steps=900) == pytest.approx(5e-3)
    assert learning_rate(config, step=460, steps=900) == pytest.approx(5e-3 * 0.55)
    assert learning_rate(config, step=900, steps=900) == pytest.approx(5e-4)


def test_a_warmup_longer_than_the_stage():
    assert rates(2, schedule="linear", warmup_steps=4) == [0.25, 0.5]
    assert rates(4, schedule="linear", warmup_steps=4)[-1] == 1.0


def test_steps_beyond_the_stage_keep_the_last_rate():
    config = OptimizerConfig(lr=1.0, schedule="linear", final_lr_ratio=0.5)
    assert learning_rate(config, step=9, steps=4) == 0.5
