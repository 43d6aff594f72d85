import random

import torch

from cosmos_core.weights.splitmix import WEYL, mix, mix_all, signed


def test_the_first_outputs_of_seed_zero_are_the_published_ones():
    states = [WEYL * number % (1 << 64) for number in (1, 2, 3)]
    assert [mix(state) for state in states] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_tensors_are_mixed_as_integers_are_and_left_as_they_were():
    draw = random.Random(4)
    states = [0, 1, (1 << 64) - 1, 1 << 63, *(draw.getrandbits(64) for _ in range(100))]
    tensor = torch.tensor([signed(state) for state in states])
    kept = tensor.clone()
    assert mix_all(tensor).tolist() == [signed(mix(state)) for state in states]
    assert torch.equal(tensor, kept)
