import pytest
import torch

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.attention import kernels, softmax
from cosmos_core.models.attention.documents import Packing
from cosmos_core.models.attention.packed import packed_attention
from cosmos_core.models.attention.softmax import Block, Scoring

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
            parts = qkv(sum(lengths))
            packing = Packing.of(lengths, CPU)
            packed, _ = packed_attention(torch.nn.Identity(), *parts, None, packing=packing, sliding_window=window)
            expected = dense(*parts, lengths, window)
            weight = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))

            torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
            gradients = torch.autograd.grad((packed * weight).sum(), parts, retain_graph=True)
            expected_gradients = torch.autograd.grad((expected * weight).sum(), parts)
            for mine, theirs in zip(gradients, expected_gradients, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_long_documents_in_pieces_of_a_window_are_the_dense_ones(monkeypatch):
    monkeypatch.setattr(softmax, "FEW_KEYS", 4)
    for lengths in [[40], [25, 24, 24, 9, 3, 1]]:
        for window in [2, 3, 7]:
            parts = qkv(sum(lengths), dtype=torch.float64)
            packing = Packing.of(lengths, CPU)
            packed, _ = packed_attention(torch.nn.Identity(), *parts, None, packing=packing, sliding_window=window)
            scoring = Scoring(scale=None, window=window)
            block = Block(rows=[part[0].mT for part in parts], documents=packing.documents, scoring=scoring)
            assert max(keys.stop - keys.start for _, keys in block.pieces()) <= 2 * max(window, 4)
            expected = dense(*parts, lengths, window)
            torch.testing.assert_close(packed.float(), expected, atol=1e-6, rtol=1e-6)
            weight = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
            gradients = torch.autograd.grad((packed * weight).sum(), parts)
            for mine, theirs in zip(gradients, torch.autograd.grad((expected * weight).sum(), parts), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_bf16():
    lengths = [9, 9, 4]
    parts = qkv(sum(lengths), dtype=torch.bfloat16)
    packed, _ = packed_attention(torch.nn.Identity(), *parts, None, packing=Packing.of(lengths, CPU))
    expected = dense(*[part.float() for part in parts], lengths)
    assert packed.dtype == torch.bfloat16
    torch.testing.assert_close(packed.float(), expected, atol=0.03, rtol=0.03)


def test_documents_of_equal_length_share_a_call(monkeypatch):
    shapes = []

    def kernel(query, *_, **options):
        shapes.append((*query.shape[::2], *options.values()))
        return query

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", kernel)
    packed_attention(torch.nn.Identity(), *qkv(31), None, packing=Packing.of([9, 9, 5, 4, 4], CPU))
    assert shapes == [(2, 9, True, None, True), (1, 5, True, None, True), (2, 4, True, None, True)]


def test_autocast_computes_in_its_dtype():
    parts = [part.detach() for part in qkv(9)]
    with torch.autocast("cpu", torch.bfloat16):
        packed, _ = packed_attention(torch.nn.Identity(), *parts, None, packing=Packing.of([9], CPU))
    assert packed.dtype == torch.bfloat16


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
                    packing=Packing.of(lengths, CPU),
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
