import pytest
import torch

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.attention import softmax
from cosmos_core.models.attention.documents import Packing
from cosmos_core.models.attention.packed import packed_attention

CPU = torch.device("cpu")


def qkv(units, *, heads=4, kv_heads=2, dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, kv_heads, kv_heads)
    return [
        torch.randn(1, h, units, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for h in sizes
    ]


def dense(query, key, value, lengths, window=None, *, softcap=None, sinks=None):
    """One masked softmax over the whole row, in float64."""
    query, key, value = query.double(), *(part.double().repeat_interleave(2, dim=1) for part in (key, value))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    mask = (document[:, None] == document) & (place[:, None] >= place)
    if window is not None:
        mask &= place[:, None] - place < window
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return (weights / total @ value).transpose(1, 2).float()


def test_packed_attention_is_the_dense_one_with_a_block_mask():
    for window in [None, 3]:
        for lengths in [[7], [9, 9, 5, 4, 4, 1, 1], [12, 11, 3], [3, 8, 8]]:
            for waste in [0, 30, 10**9]:
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


def test_long_documents_in_pieces_of_a_window_are_the_dense_ones(monkeypatch):
    for waste in [0, 10**9]:
        for lengths in [[40], [25, 24, 24, 9, 3, 1]]:
            for window in [2, 3, 7]:
                monkeypatch.setattr(softmax, "SMALLEST_PIECE", 4)
                parts = qkv(sum(lengths), dtype=torch.float64)
                packing = Packing.of(lengths, CPU, waste)
                packed, _ = packed_attention(torch.nn.Identity(), *parts, None, packing=packing, sliding_window=window)
                assert max(mask.shape[1] for mask in packing._masks.values()) <= 2 * max(window, 4)
                expected = dense(*parts, lengths, window)
                torch.testing.assert_close(packed.float(), expected, atol=1e-6, rtol=1e-6)
                weight = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
                gradients = torch.autograd.grad((packed * weight).sum(), parts)
                for mine, theirs in zip(gradients, torch.autograd.grad((expected * weight).sum(), parts), strict=True):
                    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_kernels_of_accelerators_get_no_mask_with_shared_heads(subtests, monkeypatch):
    for window, key_heads in [(None, 2), (3, 4)]:
        with subtests.test(window=window, key_heads=key_heads):
            found = []

            def kernel(query, key, value, found=found, **options):
                found.append((key.shape[1], value.shape[1], options["attn_mask"] is None))
                return torch.empty_like(query)

            monkeypatch.setattr(softmax.F, "scaled_dot_product_attention", kernel)
            packing = Packing.of([9], torch.device("meta"))
            parts = [part.to("meta") for part in qkv(9)]
            packed_attention(torch.nn.Identity(), *parts, None, packing=packing, sliding_window=window)
            assert found == [(key_heads, key_heads, window is None)]


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


def test_soft_caps_and_sinks_are_the_dense_ones(monkeypatch):
    for extras in ["cap", "sinks", "both"]:
        for window in [None, 3]:
            for piece_scores in [1 << 20, 120]:
                monkeypatch.setattr(softmax, "PIECE_SCORES", {"cpu": piece_scores})
                monkeypatch.setattr(softmax, "FEWEST_QUERIES", 1)
                lengths = [12, 11, 3, 3]
                parts = qkv(sum(lengths))
                sinks = torch.randn(4, generator=torch.Generator().manual_seed(2)).requires_grad_()
                cap = 0.7 if extras != "sinks" else None
                sinks_asked = None if extras == "cap" else sinks
                packed, _ = packed_attention(
                    torch.nn.Identity(),
                    *parts,
                    None,
                    packing=Packing.of(lengths, CPU, 30),
                    sliding_window=window,
                    softcap=cap,
                    s_aux=sinks_asked,
                )
                expected = dense(*parts, lengths, window, softcap=cap, sinks=sinks_asked)
                weight = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
                leaves = parts if sinks_asked is None else [*parts, sinks]

                torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
                gradients = torch.autograd.grad((packed * weight).sum(), leaves)
                expected_gradients = torch.autograd.grad((expected * weight).sum(), leaves)
                for mine, theirs in zip(gradients, expected_gradients, strict=True):
                    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_what_is_not_computed_is_refused():
    with pytest.raises(PluginIncompatibleError, match="no packing"):
        packed_attention(torch.nn.Identity(), *qkv(3), None)

    for asked, what in [
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "attention to later units"),
        ({"position_bias": torch.zeros(1)}, "a bias of positions"),
    ]:
        with pytest.raises(PluginIncompatibleError, match=what):
            packed_attention(torch.nn.Identity(), *qkv(3), None, packing=Packing.of([3], CPU), **asked)

    layer = torch.nn.Identity()
    layer.is_causal = False
    with pytest.raises(PluginIncompatibleError, match="attention to later units"):
        packed_attention(layer, *qkv(3), None, packing=Packing.of([3], CPU))

    packed_attention(torch.nn.Identity(), *qkv(3), None, packing=Packing.of([3], CPU), dropout=0.0, is_causal=None)

    with pytest.raises(PluginIncompatibleError, match="a mask"):
        packed_attention(torch.nn.Identity(), *qkv(3), torch.ones(1, 1, 3, 3), packing=Packing.of([3], CPU))
