import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.policy.modeling.attention import Packing, packed_attention

CPU = torch.device("cpu")


def qkv(units, *, heads=4, kv_heads=2, dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, kv_heads, kv_heads)
    return [
        torch.randn(1, h, units, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for h in sizes
    ]


def dense(query, key, value, lengths, window=None):
    """One masked softmax over the whole row."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    mask = (document[:, None] == document) & (place[:, None] >= place)
    if window is not None:
        mask &= place[:, None] - place < window
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return output.transpose(1, 2)


@pytest.mark.parametrize("waste", [0, 30, 10**9])
@pytest.mark.parametrize("lengths", [[7], [9, 9, 5, 4, 4, 1, 1], [12, 11, 3], [3, 8, 8]])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_is_the_dense_one_with_a_block_mask(lengths, waste, window):
    parts = qkv(sum(lengths))
    packing = Packing.of(lengths, CPU, waste)
    packed, _ = packed_attention(torch.nn.Identity(), *parts, None, packing=packing, sliding_window=window)
    expected = dense(*parts, lengths, window)
    weight = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((packed * weight).sum(), parts, retain_graph=True)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), parts)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_bf16():
    lengths = [9, 9, 4]
    parts = qkv(sum(lengths), dtype=torch.bfloat16)
    packed, _ = packed_attention(torch.nn.Identity(), *parts, None, packing=Packing.of(lengths, CPU))
    expected = dense(*[part.float() for part in parts], lengths)
    assert packed.dtype == torch.bfloat16
    torch.testing.assert_close(packed.float(), expected, atol=0.03, rtol=0.03)


def test_documents_of_equal_length_share_a_call_and_need_no_padding():
    runs = Packing.of([9, 9, 5, 4, 4], CPU).runs
    assert [(run.num_documents, run.longest) for run in runs] == [(2, 9), (1, 5), (2, 4)]
    assert all(run.pad_BT is None for run in runs)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({}, "no packing"),
        ({"softcap": 30.0}, "a soft cap"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
    ],
)
def test_what_is_not_computed_is_refused(asked, what):
    packing = Packing.of([3], CPU) if asked else None
    with pytest.raises(PluginIncompatibleError, match=what):
        packed_attention(torch.nn.Identity(), *qkv(3), None, packing=packing, **asked)


def test_a_mask_is_refused():
    with pytest.raises(PluginIncompatibleError, match="a mask"):
        packed_attention(torch.nn.Identity(), *qkv(3), torch.ones(1, 1, 3, 3), packing=Packing.of([3], CPU))
