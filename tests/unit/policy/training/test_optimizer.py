import torch

from cosmos_core.config.schema import OptimizerConfig
from cosmos_core.policy.training.gradients import AdamW


def test_the_first_step_by_hand():
    """With bias correction, Adam's first step is lr · sign(g) (up to epsilon), after decay by lr · wd."""
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight.data[:] = torch.tensor([[1.0, -2.0]])
    optimizer = AdamW(module, OptimizerConfig(weight_decay=0.5))
    module.weight.grad = torch.tensor([[3.0, -4.0]])
    optimizer.step(0.1, 0.5)
    torch.testing.assert_close(module.weight.data, torch.tensor([[1.0 * 0.95 - 0.1, -2.0 * 0.95 + 0.1]]))


def test_the_state_is_there_before_the_first_step_and_can_be_written_into():
    module, twin = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    twin.load_state_dict(module.state_dict())
    first, second = AdamW(module, OptimizerConfig(lr=0.1)), AdamW(twin, OptimizerConfig(lr=0.1))
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
