"""What a model makes of its weights when it has loaded them is found, wherever it hangs."""

import torch
from torch import nn

from cosmos_engine_vllm.census import census, is_default, made_since


class Kernel:
    """An object of vLLM's own, which is no module."""

    __module__ = "vllm.kernels"

    def __init__(self):
        self.packed = None


def model():
    made = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).requires_grad_(requires_grad=False)
    nn.init.normal_(made[1].weight)
    made[0].kernel = Kernel()
    made[0].register_buffer("scale", torch.rand(1))
    made[1].register_buffer("table", torch.arange(5.0), persistent=False)
    made[0].shared = made[0].weight.t()
    return made


def attribute(made):
    made[0].absorbed = made[0].weight @ made[0].weight.t()
    return "0.absorbed"


def inside(made):
    made[0].kernel.packed = {"w": [made[0].weight * 2]}
    return "0.kernel.packed.w.0"


def parameter(made):
    made[0].weight = nn.Parameter(made[0].weight.flip(0).contiguous(), requires_grad=False)
    return "0.weight"


def buffer(made):
    made[1].table.copy_(made[0].weight.flatten()[:5])
    return "1.table"


def test_what_is_made_of_weights_is_named(subtests):
    for change in [attribute, inside, parameter, buffer]:
        with subtests.test(change=change):
            made = model()
            before = census(made)
            assert change(made) in made_since(made, before)


def more_bits(made):
    made[0].bias.data = made[0].bias.double()


def views(made):
    made[0].again = made[0].weight[1:]


def defaults(made):
    made[0].scale.fill_(1.0)
    made[0].zero = torch.zeros(3)


def nothing(made):
    pass


def integers(made):
    made[0].order = torch.arange(3)


def test_what_follows_weights_or_is_none_is_not(subtests):
    for change in [nothing, more_bits, views, defaults, integers]:
        with subtests.test(change=change):
            made = model()
            before = census(made)
            change(made)
            assert made_since(made, before) == []


def test_scales_of_what_is_not_quantised_are_defaults():
    assert is_default(torch.ones(3))
    assert is_default(torch.zeros(2, 2))
    assert not is_default(torch.tensor([1.0, 0.0]))
    assert not is_default(torch.tensor(0.5))
