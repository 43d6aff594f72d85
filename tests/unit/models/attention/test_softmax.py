import contextlib

import torch

from cosmos_core.models.attention import softmax, varlen
from cosmos_core.models.attention.documents import Documents
from cosmos_core.models.attention.softmax import Block, Merged, Scoring, block_backward, block_forward, sinks_backward
from tests.unit.models.attention.flash import on_cpus


def whole(query, both, mask, cap, sinks):
    """Softmax over all keys; heads 2 share one key-value head, values are 3 wide."""
    key, value = both.repeat_interleave(2, dim=1).split((8, 3), dim=-1)
    scores = torch.einsum("qhd,fhd->qhf", query, key) * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None].expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : mask.shape[1]]
    return torch.einsum("qhf,fhe->qhe", weights, value), scores.logsumexp(-1)


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_gradients_of_blocks_are_terms_of_the_whole_softmaxs(subtests, monkeypatch):
    monkeypatch.setattr(softmax, "PIECE_SCORES", {"cpu": 100})
    for by_varlen, fewest in [(False, 16), (False, 1), (True, 16)]:
        with subtests.test(by_varlen=by_varlen, fewest=fewest), on_cpus() if by_varlen else contextlib.nullcontext():
            monkeypatch.setattr(softmax, "FEWEST_QUERIES", fewest)
            for has_sinks in [False, True]:
                for window, cap in [
                    (None, None),
                    (4, None),
                    (9, None),
                    *([] if by_varlen else [(None, 0.5), (9, 0.5)]),
                ]:
                    check_blocks(window, cap, drawn(4, seed=2) if has_sinks else None)


def check_blocks(window, cap, sinks):
    query, both = drawn(5, 4, 8, seed=0), drawn(12, 2, 11, seed=1)
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7)
    mask = mask if window is None else mask.triu(7 - window + 1)
    output, lse = whole(query, both, mask, cap, sinks)
    weight = drawn(*output.shape, seed=3).detach()
    leaves = (query, both) if sinks is None else (query, both, sinks)
    expected = torch.autograd.grad((output * weight).sum(), leaves)
    with torch.no_grad():
        scoring = Scoring(scale=0.3, window=window, cap=cap)
        own, earlier = block(query, both[7:], 0, scoring), block(query, both[:7], 7, scoring)
        assert (own.call is None, earlier.call is None) == (varlen.takes(query, both[..., 8:]) is False,) * 2
        merged = Merged.of(block_forward(own)).with_block(block_forward(earlier)).with_sinks(sinks)
        torch.testing.assert_close(merged.lse_QH, lse, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(merged.output_QHE, output, atol=1e-5, rtol=1e-5)
        gradients = [block_backward(each, weight, output, lse) for each in (earlier, own)]
        found = [gradients[0][0] + gradients[1][0], torch.cat([torch.cat(each[1:], dim=-1) for each in gradients])]
        found += [] if sinks is None else [sinks_backward(sinks, weight, output, lse)]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def block(query, both, num_behind, scoring):
    documents = Documents(lengths=(len(query),), num_behind=num_behind, num_keys=len(both), device=query.device)
    return Block(rows=(query, *both.split((8, 3), dim=-1)), documents=documents, scoring=scoring)


def test_of_documents_and_windows_only_keys_that_are_seen_are_scored(monkeypatch):
    monkeypatch.setattr(softmax, "FEW_KEYS", 1)
    for lengths, window, most in [((1000,), 10, 1000 * 20), ((50,) * 20, None, 1000 * 100), ((1000,), None, 760_000)]:
        documents = Documents(lengths=lengths, device=torch.device("cpu"))
        rows = (torch.ones(1000, 2, 4),) * 3
        pieces = Block(rows=rows, documents=documents, scoring=Scoring(scale=1.0, window=window)).pieces()
        assert sum((part.stop - part.start) * (keys.stop - keys.start) for part, keys in pieces) <= most


def test_a_block_without_queries_gives_no_gradient():
    empty = block(torch.ones(0, 4, 8), torch.ones(3, 2, 11), 3, Scoring(scale=1.0))
    output, lse = block_forward(empty)
    assert (output.shape, lse.shape) == ((0, 4, 3), (0, 4))
    for grad, row in zip(block_backward(empty, output, output, lse), empty.rows, strict=True):
        assert grad.equal(torch.zeros_like(row))
