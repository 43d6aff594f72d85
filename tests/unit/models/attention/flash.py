"""CUDA's flash operators as their documents have it, in float64 on CPUs, and stricter about what they are given."""

from __future__ import annotations

import contextlib
import itertools

import torch

from cosmos_core.models.attention import varlen


@contextlib.contextmanager
def on_cpus(widest=256):
    """Within it, `varlen` takes tensors of a CPU."""
    taken = varlen.takes
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        varlen.takes = lambda query, value: max(query.shape[-1], value.shape[-1]) <= widest
        try:
            yield
        finally:
            varlen.takes = taken


@contextlib.contextmanager
def pages_on_cpus(page, reads_tables=True):
    """Within it, `varlen` reads caches of a CPU, in pages of so many units."""
    before = varlen.PAGE, varlen.reads_tables, varlen.refusal_of_pages
    varlen.PAGE, varlen.reads_tables = page, lambda: reads_tables
    varlen.refusal_of_pages = lambda *_: ""
    try:
        with on_cpus():
            yield
    finally:
        varlen.PAGE, varlen.reads_tables, varlen.refusal_of_pages = before


def documents(rows, cumulative, longest, is_causal, window):
    """Each document's places, and what its queries see."""
    (query, key, value), (left, right) = rows, window
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    for row in rows:
        assert row.stride(-1) == 1
        assert not any(step % 8 for step in (*row.stride()[:-1], row.storage_offset()))
    assert [each.dtype for each in cumulative] == [torch.int32] * 2
    assert [int(each[-1]) for each in cumulative] == [len(query), len(key)]
    ends = zip(*(zip(each.tolist(), each.tolist()[1:], strict=False) for each in cumulative), strict=True)
    for queries, keys in ends:
        num_queries, num_keys = queries[1] - queries[0], keys[1] - keys[0]
        assert num_queries <= longest[0]
        assert num_keys <= longest[1]
        distance = torch.arange(num_keys) - (torch.arange(num_queries)[:, None] + num_keys - num_queries)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left is not None and left >= 0:
            seen &= distance >= -left
        if is_causal or (right is not None and right >= 0):
            seen &= distance <= (0 if is_causal else right)
        assert seen.any(1).all(), "a query sees no key"
        yield slice(*queries), slice(*keys), seen


def laid_out(cached, starts, lengths, table, most):
    """Keys and values of a cache's sequences, one after another, and where they end."""
    assert {lengths.dtype, starts.dtype} == {torch.int32}
    assert len(starts) == len(lengths) + 1
    assert (lengths > 0).all()
    assert (lengths <= most).all()
    if table is not None:
        assert table.dtype == torch.int32
        assert most == table.shape[1] * cached[0].shape[1]
    parts = []
    for row, length in enumerate(lengths.tolist()):
        if table is None:
            parts.append([block[starts[row] : starts[row] + length] for block in cached])
        else:
            pages = table[row, : -(-length // cached[0].shape[1])]
            parts.append([block[pages].flatten(0, 1)[:length] for block in cached])
    ends = [0, *itertools.accumulate(lengths.tolist())]
    return *(torch.cat(each) for each in zip(*parts, strict=True)), torch.tensor(ends, dtype=torch.int32)


def softmax(rows, places, scale):
    """Scores [H, Q, F], and the rows of a document in float64, heads first and repeated."""
    queries, keys, seen = places
    group = rows[0].shape[1] // rows[1].shape[1]
    query = rows[0][queries].double().transpose(0, 1)
    key, value = (row[keys].double().repeat_interleave(group, dim=1).transpose(0, 1) for row in rows[1:])
    return (query @ key.mT * scale).masked_fill(~seen, -torch.inf), query, key, value


def forward(  # noqa: PLR0917 - as the operator has them
    query, key, value, ends_q, ends_k, most_q, most_k, dropout, is_causal, _debug, *, scale,
    window_size_left, window_size_right, seqused_k=None, block_table=None, num_splits=None, **unused,
):  # fmt: skip
    assert dropout == 0.0
    assert not any(unused.values())
    if seqused_k is not None:
        assert num_splits == (None if block_table is None else 1)
        key, value, ends_k = laid_out((key, value), ends_k, seqused_k, block_table, most_k)
    rows, output = (query, key, value), torch.empty_like(query)
    lse = query.new_empty((query.shape[1], len(query)), dtype=torch.promote_types(query.dtype, torch.float32))
    window = (window_size_left, window_size_right)
    for places in documents(rows, (ends_q, ends_k), (most_q, most_k), is_causal, window):
        scores, _, _, values = softmax(rows, places, scale)
        output[places[0]] = (scores.softmax(-1) @ values).transpose(0, 1).to(output.dtype)
        lse[:, places[0]] = scores.logsumexp(-1).to(lse.dtype)
    state = torch.zeros(2, dtype=torch.uint64)
    return output, lse, state, state[0], query.new_empty(0)


def backward(  # noqa: PLR0917 - as the operator has them
    grad, query, key, value, output, lse, ends_q, ends_k, most_q, most_k, dropout, is_causal, _state, _unused, *, scale,
    window_size_left, window_size_right,
):  # fmt: skip
    assert dropout == 0.0
    assert lse.is_contiguous()
    assert {row.dtype for row in (grad, key, value, output)} == {query.dtype}
    rows = (query, key, value)
    grads = [torch.zeros(row.shape, dtype=torch.float64) for row in rows]
    group = query.shape[1] // key.shape[1]
    window = (window_size_left, window_size_right)
    for places in documents(rows, (ends_q, ends_k), (most_q, most_k), is_causal, window):
        scores, queries, keys, values = softmax(rows, places, scale)
        own, whole = (row[places[0]].double().transpose(0, 1) for row in (grad, output))
        weights = (scores - lse[:, places[0], None].double()).exp()
        towards = weights * (own @ values.mT - (own * whole).sum(-1, keepdim=True)) * scale
        grads[0][places[0]] += (towards @ keys).transpose(0, 1)
        for found, each in zip(grads[1:], (towards.mT @ queries, weights.mT @ own), strict=True):
            found[places[1]] += torch.unflatten(each, 0, (-1, group)).sum(1).transpose(0, 1)
    return tuple(each.to(query.dtype) for each in grads)
