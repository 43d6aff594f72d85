import pytest
import torch

from cosmos_core.policy.modeling.attention import blocks
from cosmos_core.policy.modeling.attention.blocks import Block, block_backward, block_forward


def whole(query, both, mask):
    """Softmax over all keys, and its log-sum-exp; heads 2 share one key-value head, values are 3 wide."""
    key, value = both.repeat_interleave(2, dim=1).split((8, 3), dim=-1)
    scores = torch.einsum("qhd,fhd->qhf", query, key) * 0.3
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return torch.einsum("qhf,fhe->qhe", scores.softmax(-1), value), scores.logsumexp(-1)


@pytest.mark.parametrize("kernel", ["cpu", "full"])
def test_gradients_of_blocks_are_terms_of_the_whole_softmaxs(monkeypatch, kernel):
    monkeypatch.setattr(blocks, "kernel_of", lambda _: kernel)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, 4, 8, generator=generator).requires_grad_()
    both = torch.randn(12, 2, 11, generator=generator).requires_grad_()
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7)
    output, lse = whole(query, both, mask)
    weight = torch.randn(output.shape, generator=generator)
    expected = torch.autograd.grad((output * weight).sum(), (query, both))

    with torch.no_grad():
        earlier = Block(query_QHD=query, both_FKE=both[:7], is_causal=False, scale=0.3)
        own = Block(query_QHD=query, both_FKE=both[7:], is_causal=True, scale=0.3)
        parts = [block_forward(block) for block in (earlier, own)]
        total = torch.logaddexp(parts[0][1], parts[1][1])
        merged = sum(part * (part_lse - total).exp()[..., None] for part, part_lse in parts)
        torch.testing.assert_close(total, lse, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(merged, output, atol=1e-5, rtol=1e-5)
        gradients = [block_backward(block, weight, output, lse) for block in (earlier, own)]
    torch.testing.assert_close(gradients[0][0] + gradients[1][0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat((gradients[0][1], gradients[1][1])), expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["cpu", "full"])
def test_a_block_without_queries_gives_no_gradient(monkeypatch, kernel):
    monkeypatch.setattr(blocks, "kernel_of", lambda _: kernel)
    block = Block(query_QHD=torch.ones(0, 4, 8), both_FKE=torch.ones(3, 2, 11), is_causal=False, scale=1.0)
    output, lse = block_forward(block)
    assert (output.shape, lse.shape) == ((0, 4, 3), (0, 4))
    query_grad, both_grad = block_backward(block, output, output, lse)
    assert query_grad.shape == (0, 4, 8)
    assert both_grad.equal(torch.zeros(3, 2, 11))
