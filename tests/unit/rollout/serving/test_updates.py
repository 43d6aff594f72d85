from __future__ import annotations

import torch

from cosmos_core.rollout.serving.updates import same_bits

NAN = float("nan")


def test_the_same_bits_in_any_dtype_and_strides():
    for dtype in [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]:
        one = torch.arange(6.0).view(2, 3).to(dtype)
        assert same_bits(one, one.t().contiguous().t())
        other = one.clone()
        other[1, 2] = 1
        assert not same_bits(one, other)


def test_bits_count_and_not_numbers():
    for one, other, is_same in [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([NAN]), torch.tensor([NAN]), True),
        (torch.tensor(1.0), torch.tensor(1.0), True),
        (torch.empty(0, 2), torch.empty(0, 2), True),
        (torch.zeros(2, 1), torch.zeros(1, 2), False),
        (torch.zeros(2, dtype=torch.int16), torch.zeros(2, dtype=torch.bfloat16), False),
    ]:
        assert same_bits(one, other) is is_same
