import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.weights import digest
from cosmos_core.weights.digest import (
    WEYL,
    add_digests,
    combine,
    digest_of,
    mix,
    mix_all,
    signed,
    tensor_digest,
    tensor_digests,
)

torch.set_num_threads(1)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def filled(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def by_hand(name, tensor):
    """The digest's definition, in Python integers, element by element."""
    mask = digest.MODULUS - 1

    def key(stream, index):
        mixed = (index * 0x9E3779B97F4A7C15 + stream) & mask
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        return mixed ^ (mixed >> 31) | 1

    rows, columns = tensor.shape
    bits = tensor.view(torch.int32).tolist()
    total = sum(
        key(digest._ROW_STREAM, r) * key(digest._COLUMN_STREAM, c) * bits[r][c]
        for r in range(rows)
        for c in range(columns)
    )
    odd, per_element = digest._name_keys(name, "torch.float32", tuple(tensor.shape))
    return (odd * total + per_element * tensor.numel()) & mask


def test_it_is_the_sum_that_the_docstring_says():
    tensor = filled((5, 7), torch.float32)
    assert tensor_digest("w", tensor) == by_hand("w", tensor)


@given(data=st.data())
def test_slices_add_up_to_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    whole = filled(shape, dtype)
    total, stack = 0, [((0,) * len(shape), shape)]
    while stack:
        start, size = stack.pop()
        dim = data.draw(st.integers(-1, len(shape) - 1))
        if dim >= 0 and size[dim] > 1:
            cut = data.draw(st.integers(1, size[dim] - 1))
            stack.append((start, (*size[:dim], cut, *size[dim + 1 :])))
            later = (*start[:dim], start[dim] + cut, *start[dim + 1 :])
            stack.append((later, (*size[:dim], size[dim] - cut, *size[dim + 1 :])))
            continue
        part = whole[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
        total += tensor_digest("w", part, start=start, shape=shape)
    assert total % digest.MODULUS == tensor_digest("w", whole)


def test_blocks_and_tables_do_not_show(monkeypatch, subtests):
    for shape in [(100, 40), (70_000, 3), (3, 70_000), (200_000,)]:
        with subtests.test(shape=shape):
            tensor = filled(shape, torch.float32)
            before = tensor_digest("w", tensor)
            monkeypatch.setattr(digest, "_TABLE", 128)
            monkeypatch.setattr(digest, "_BLOCK", {"cpu": 77_777})
            digest._table.cache_clear()
            assert tensor_digest("w", tensor) == before
            digest._table.cache_clear()


def test_strides_do_not_matter():
    tensor = filled((6, 10), torch.bfloat16)
    transposed = tensor.t().contiguous().t()
    assert tensor_digest("w", transposed) == tensor_digest("w", tensor)
    assert tensor_digest("w", filled((6, 10), torch.float64)[:, ::2]) == tensor_digest(
        "w", filled((6, 10), torch.float64)[:, ::2].contiguous()
    )


def test_every_single_changed_element_changes_it(subtests):
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            tensor = filled((4, 9), dtype)
            before = tensor_digest("w", tensor)
            raw = tensor.view(torch.uint8).flatten()
            for place in range(0, raw.numel(), 5):
                for bit in (0, 7):
                    if dtype is torch.bool and bit:
                        continue
                    raw[place] ^= 1 << bit
                    assert tensor_digest("w", tensor) != before
                    raw[place] ^= 1 << bit
            assert tensor_digest("w", tensor) == before


def test_faults_that_keep_the_values_change_it():
    tensor = filled((64, 64), torch.bfloat16)
    before = tensor_digest("w", tensor)
    swapped_rows = tensor[[1, 0, *range(2, 64)]]
    swapped_halves = torch.cat([tensor[:, 32:], tensor[:, :32]], dim=1)
    for wrong in (tensor.t(), tensor.flip(0), tensor.roll(1), -tensor, swapped_rows, swapped_halves):
        assert tensor_digest("w", wrong) != before
    two = tensor.clone()
    two[3, 5], two[40, 7] = tensor[40, 7], tensor[3, 5]
    assert tensor_digest("w", two) != before


def test_powers_of_two_in_eight_byte_types_are_told_apart():
    # All low bits of these patterns are zero, so a sum over whole 64-bit integers would lose most of the keys.
    values = torch.tensor([1.0, 2.0, 4.0, -1.0, 0.5, 8.0, 16.0, 32.0], dtype=torch.float64)
    digests = {tensor_digest("w", values[torch.randperm(8)]) for _ in range(300)}
    assert len(digests) >= 290


def test_name_dtype_shape_and_absence_count():
    zeros = torch.zeros(4, 4)
    different = {
        tensor_digest("w", zeros),
        tensor_digest("v", zeros),
        tensor_digest("w", zeros.bfloat16()),
        tensor_digest("w", zeros.view(2, 8)),
        tensor_digest("w", zeros[:2], start=(0, 0), shape=(4, 4)),
        0,
    }
    assert len(different) == 6


def test_the_models_digest_ignores_order_but_not_names():
    tensors = {"a": filled((3, 4), torch.float32, 1), "b": filled((3, 4), torch.float32, 2)}
    swapped = {"a": tensors["b"], "b": tensors["a"]}
    assert digest_of(dict(reversed(tensors.items()))) == digest_of(tensors)
    assert len({digest_of(tensors), digest_of(swapped), digest_of({"a": tensors["a"]}), digest_of({})}) == 4


def test_ranks_add_their_parts():
    tensors = {"a": filled((6, 4), torch.float32, 1), "b": filled((3,), torch.float32, 2)}
    first = {"a": tensor_digest("a", tensors["a"][:4], start=(0, 0), shape=(6, 4))}
    second = {
        "a": tensor_digest("a", tensors["a"][4:], start=(4, 0), shape=(6, 4)),
        **tensor_digests({"b": tensors["b"]}),
    }
    assert combine(add_digests([first, second])) == digest_of(tensors)
    assert add_digests([first]) != add_digests([first, second])


def test_scalars_and_empty_tensors():
    assert tensor_digest("w", torch.tensor(1.5)) != tensor_digest("w", torch.tensor(2.5))
    assert tensor_digest("w", torch.empty(0, 3)) == 0
    assert math.isclose(torch.tensor(1.5, requires_grad=True).item(), 1.5)
    assert tensor_digest("w", torch.tensor(1.5, requires_grad=True)) == tensor_digest("w", torch.tensor(1.5))


def test_a_slice_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"w: a slice of shape \(2, 4\) at \(3, 0\)"):
        tensor_digest("w", torch.zeros(2, 4), start=(3, 0), shape=(4, 4))


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
