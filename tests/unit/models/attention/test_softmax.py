import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cosmos_core.models.attention import softmax
from cosmos_core.models.attention.softmax import (
    Merged,
    Scoring,
    block_backward,
    block_forward,
    kernel_of,
    sinks_backward,
)


def whole(query, both, mask, cap, sinks):
    """Softmax over all keys; heads 2 share one key-value head, values are 3 wide."""
    key, value = both.repeat_interleave(2, dim=2).split((8, 3), dim=-1)
    scores = torch.einsum("bqhd,bfhd->bqhf", query, key) * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None].expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : mask.shape[1]]
    return torch.einsum("bqhf,bfhe->bqhe", weights, value), scores.logsumexp(-1)


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_gradients_of_blocks_are_terms_of_the_whole_softmaxs(subtests, monkeypatch):
    for kernel in [None, "full"]:
        with subtests.test(kernel=kernel):
            for has_sinks in [False, True]:
                for window, cap in [(None, None), (4, None), (None, 0.5), (9, 0.5)]:
                    for fewest in [16, 1]:
                        monkeypatch.setattr(softmax, "PIECE_SCORES", {"cpu": 100})
                        monkeypatch.setattr(softmax, "FEWEST_QUERIES", fewest)
                        if kernel is not None:
                            monkeypatch.setattr(softmax, "kernel_of", lambda _, kernel=kernel: kernel)
                        query, both = drawn(2, 5, 4, 8, seed=0), drawn(2, 12, 2, 11, seed=1)
                        sinks = drawn(4, seed=2) if has_sinks else None
                        mask = torch.ones(5, 12, dtype=torch.bool).tril(7)
                        mask = mask if window is None else mask.triu(7 - window + 1)
                        output, lse = whole(query, both, mask, cap, sinks)
                        weight = drawn(*output.shape, seed=3).detach()
                        leaves = (query, both) if sinks is None else (query, both, sinks)
                        expected = torch.autograd.grad((output * weight).sum(), leaves)

                        with torch.no_grad():
                            scoring = Scoring(scale=0.3, window=window, cap=cap)
                            own = scoring.block(query, both[:, 7:], 0)
                            earlier = scoring.block(query, both[:, :7], 7)
                            merged = Merged.of(block_forward(own)).with_block(block_forward(earlier)).with_sinks(sinks)
                            torch.testing.assert_close(merged.lse_BQH, lse, atol=1e-5, rtol=1e-5)
                            torch.testing.assert_close(merged.output_BQHD, output, atol=1e-5, rtol=1e-5)
                            result = (weight, output, lse)
                            gradients = [block_backward(block, *result) for block in (earlier, own)]
                            sinks_gradient = sinks_backward(sinks, *result)
                        torch.testing.assert_close(gradients[0][0] + gradients[1][0], expected[0], atol=1e-5, rtol=1e-5)
                        torch.testing.assert_close(
                            torch.cat((gradients[0][1], gradients[1][1]), dim=1), expected[1], atol=1e-5, rtol=1e-5
                        )
                        if has_sinks:
                            torch.testing.assert_close(sinks_gradient, expected[2], atol=1e-5, rtol=1e-5)


def test_flash_kernels_take_what_is_seen_whole_or_causal():
    for num_behind, window, cap, kernel in [
        (0, None, None, "cpu"),
        (5, None, None, "cpu"),
        (0, 5, None, "cpu"),  # a window as long as the document cuts nothing
        (5, 10, None, "cpu"),
        (0, 4, None, "full"),
        (5, 9, None, "full"),
        (2, None, None, "full"),
        (0, None, 1.0, "full"),
    ]:
        scoring = Scoring(scale=1.0, window=window, cap=cap)
        block = scoring.block(torch.ones(1, 5, 2, 4), torch.ones(1, 5, 2, 8), num_behind)
        assert kernel_of(block) == kernel


def test_the_flash_kernel_of_cuda_takes_16_bits_and_head_dims_that_it_has():
    for dim, dtype, kernel in [
        (64, torch.bfloat16, "cuda"),
        (256, torch.float16, "cuda"),
        (64, torch.float32, "full"),
        (20, torch.bfloat16, "full"),
        (288, torch.bfloat16, "full"),
    ]:
        with FakeTensorMode():
            rows = [torch.empty(1, 5, 2, size, dtype=dtype, device="cuda") for size in (dim, 2 * dim)]
            assert kernel_of(Scoring(scale=1.0).block(*rows, 0)) == kernel


def test_of_a_window_only_keys_that_are_seen_are_scored(monkeypatch):
    monkeypatch.setattr(softmax, "NARROW_WINDOW", 1)
    block = Scoring(scale=1.0, window=10).block(torch.ones(1, 1000, 2, 4), torch.ones(1, 1000, 2, 8), 0)
    assert sum(len(queries) * len(keys) for queries, keys in block.pieces()) < 1000 * 20


def test_a_block_without_queries_gives_no_gradient(subtests, monkeypatch):
    for kernel in ["cpu", "full"]:
        with subtests.test(kernel=kernel):
            monkeypatch.setattr(softmax, "kernel_of", lambda _, kernel=kernel: kernel)
            block = Scoring(scale=1.0).block(torch.ones(1, 0, 4, 8), torch.ones(1, 3, 2, 11), 3)
            output, lse = block_forward(block)
            assert (output.shape, lse.shape) == ((1, 0, 4, 3), (1, 0, 4))
            query_grad, both_grad = block_backward(block, output, output, lse)
            assert query_grad.shape == (1, 0, 4, 8)
            assert both_grad.equal(torch.zeros(1, 3, 2, 11))
