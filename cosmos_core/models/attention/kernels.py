"""The kernels of attention over packed documents: the first of `KERNELS` that takes a call computes it.

| kernel | takes | computes |
|---|---|---|
| `varlen` | no soft cap; CUDA, 16 bits, head dims to 256 | all documents at once, sinks and windows too |
| `flex` | soft caps without sinks; CUDA, 16 bits | all documents at once, compiled |
| `sdpa` | no cap, sinks, window that cuts, or keys behind; on CUDA 16 or 32 bits | documents of one length at once |
| `explicit` | everything | the reference: scores that are seen, for some queries at once |

Beside them `varlen.from_pages` attends over the pages of a cache while sequences decode; `varlen.refusal_of_pages` says
what it does not take.

Shape legend: U queries, S keys, H heads, K key-value heads, D head dim, E value dim; B documents of T units that lie
alike; Q and F blocks of queries and of keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Final

import attrs
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._triton import has_triton

from cosmos_core.models.attention import varlen
from cosmos_core.models.attention.documents import Documents, Seen
from cosmos_core.models.attention.softmax import (
    Block,
    Merged,
    Scoring,
    block_backward,
    block_forward,
    sinks_backward,
)
from cosmos_core.models.attention.varlen import Rows

BLOCK: Final = 128
"""Units of a block of FlexAttention."""


@attrs.frozen
class Kernel:
    """A way to attend, and whether it takes these rows, documents and scores."""

    name: str
    takes: Callable[[Rows, Documents, Scoring], bool]
    attend: Callable[[Rows, Documents, Scoring], torch.Tensor]


def attend(rows: Rows, documents: Documents, scoring: Scoring) -> torch.Tensor:
    """The output [U, H, E] of query [U, H, D], key [S, K, D] and value [S, K, E]."""
    if not documents.lengths:
        return rows[0].new_empty((0, rows[0].shape[1], rows[2].shape[2]))
    return kernel_for(rows, documents, scoring).attend(rows, documents, scoring)


def kernel_for(rows: Rows, documents: Documents, scoring: Scoring) -> Kernel:
    """The kernel that computes a call."""
    return next(kernel for kernel in KERNELS if kernel.takes(rows, documents, scoring))


def _takes_varlen(rows: Rows, _: Documents, scoring: Scoring) -> bool:
    return scoring.cap is None and varlen.takes(rows[0], rows[2])


def _softmax(rows: Rows, documents: Documents, scoring: Scoring) -> torch.Tensor:
    """One block, by `varlen` or explicitly, and sinks."""
    output: torch.Tensor = _Softmax.apply(*rows, scoring.sinks_H, documents, scoring)  # type: ignore[no-untyped-call]
    return output


def _takes_flex(rows: Rows, _: Documents, scoring: Scoring) -> bool:
    query, width = rows[0], min(rows[0].shape[-1], rows[2].shape[-1])
    is_fit = query.is_cuda and query.dtype in varlen.DTYPES and width >= 16
    return is_fit and scoring.cap is not None and scoring.sinks_H is None and has_triton()


def _flex(rows: Rows, documents: Documents, scoring: Scoring) -> torch.Tensor:
    heads = (row.transpose(0, 1)[None] for row in rows)
    options = {"scale": scoring.scale, "enable_gqa": rows[0].shape[1] != rows[1].shape[1]}
    mask = documents.once(block_mask, scoring.window)
    output_BHUE: torch.Tensor = compiled_flex()(
        *heads, score_mod=_capped(scoring.cap or 0.0), block_mask=mask, **options
    )
    return output_BHUE[0].transpose(0, 1)


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """One graph, of all layers and sizes of rows."""
    return torch.compile(flex_attention)


@functools.cache
def _capped(cap: float) -> Callable[..., torch.Tensor]:
    return lambda score, _batch, _head, _query, _key: cap * torch.tanh(score / cap)


def block_mask(documents: Documents, window: int | None) -> BlockMask:
    """The blocks of keys that each block of queries looks at: neighbours, since documents and windows are."""
    seen = documents.once(Seen.of, window)
    first, last = documents.once(Seen.there, window)
    begin_Q = seen.first_U[::BLOCK] // BLOCK
    end_Q = np.append(seen.last_U[BLOCK - 1 :: BLOCK], seen.last_U[-1])[: len(begin_Q)] // BLOCK + 1
    num_blocks = -(-documents.num_keys // BLOCK)
    blocks = (end_Q - begin_Q, (begin_Q[:, None] + np.arange(num_blocks)) % num_blocks)
    counts, indices = (torch.from_numpy(each)[None, None].to(documents.device, torch.int32) for each in blocks)

    def is_seen(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (first[query] <= key) & (key <= last[query])

    lengths = (len(seen.first_U), documents.num_keys)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK, mask_mod=is_seen, seq_lengths=lengths)


def _takes_sdpa(rows: Rows, documents: Documents, scoring: Scoring) -> bool:
    is_cut = scoring.window is not None and scoring.window < max(documents.lengths)
    is_plain = scoring.cap is None and scoring.sinks_H is None and not is_cut and not documents.num_behind
    # CUDA's memory-efficient kernel takes these; of any others torch would hold all scores of a document.
    is_fused = rows[0].dtype in {torch.float32, *varlen.DTYPES} and not any(row.shape[-1] % 8 for row in rows)
    return is_plain and (is_fused or not rows[0].is_cuda)


def _sdpa(rows: Rows, documents: Documents, scoring: Scoring) -> torch.Tensor:
    if rows[0].is_cuda:
        rows = repeated(rows)
    is_shared = rows[0].shape[1] != rows[1].shape[1]
    alike = [(length, len([*each])) for length, each in itertools.groupby(documents.lengths)]
    # Slicing a row would cost a zero fill of its size for each document in the backward pass.
    parts = zip(*(torch.split(row, [length * count for length, count in alike]) for row in rows), strict=True)
    outputs = []
    for (length, _), part in zip(alike, parts, strict=True):
        query, key, value = (torch.unflatten(row, 0, (-1, length)).transpose(1, 2) for row in part)
        output_BHTE = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scale, enable_gqa=is_shared
        )
        outputs.append(output_BHTE.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def repeated(rows: Rows) -> Rows:
    """The rows with keys and values of each head by itself: in CUDA's memory-efficient kernel heads share none."""
    query, *shared = rows
    key, value = (row.repeat_interleave(query.shape[1] // row.shape[1], dim=1) for row in shared)
    return query, key, value


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor | None,
        documents: Documents,
        scoring: Scoring,
    ) -> torch.Tensor:
        output, lse = block_forward(Block(rows=(query, key, value), documents=documents, scoring=scoring))
        if sinks_H is not None:
            merged = Merged.of((output, lse)).with_sinks(sinks_H)
            output, lse = merged.output_QHE, merged.lse_QH
        output = output.to(query.dtype)
        ctx.documents, ctx.scoring = documents, attrs.evolve(scoring, sinks_H=None)
        ctx.save_for_backward(query, key, value, sinks_H, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks_H, *softmax = ctx.saved_tensors
        rows = (query, key, value)
        grads = block_backward(Block(rows=rows, documents=ctx.documents, scoring=ctx.scoring), grad, *softmax)
        own = (each.to(row.dtype) for each, row in zip(grads, rows, strict=True))
        return *own, sinks_backward(sinks_H, grad, *softmax), None, None


KERNELS: Final = (
    Kernel("varlen", _takes_varlen, _softmax),
    Kernel("flex", _takes_flex, _flex),
    Kernel("sdpa", _takes_sdpa, _sdpa),
    Kernel("explicit", lambda *_: True, _softmax),
)
"""In the order in which they are asked."""
