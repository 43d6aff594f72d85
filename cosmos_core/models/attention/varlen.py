"""FlashAttention over documents of any length that lie one after another (CUDA, 16 bits).

These are the operators behind `torch.nn.attention.varlen.varlen_attn`, with the arguments that they have in torch 2.11
and later: called directly they give the log-sum-exp, and take one of a larger softmax in the backward pass.

Of a document's Q queries and F keys the last ones are the same unit: the query q sees the key f if
`-left <= f - (q + F - Q) <= right`, where a `left` of -1 bounds nothing. Every query has to see a key.

Shape legend: U queries, S keys, H heads, K key-value heads, D head dim, E value dim; B sequences that a cache holds in
pages of P units, at most W each.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch._subclasses.fake_tensor import FakeTensor

from cosmos_core.models.attention.documents import Documents, Seen

DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
_STEP: Final = 8
"""Widths and strides are multiples of it, for loads of 16 bytes."""

PAGE: Final = 256
"""Units of a page are a multiple of it where the kernel reads a table of pages."""

Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query [U, H, D], key [S, K, D] and value [S, K, E]."""

aten = torch.ops.aten


def takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether the kernel runs on these tensors' device, in their dtype and width.

    Tensors without storage count as those of a GPU, for which plans are made.
    """
    width = max(query.shape[-1], value.shape[-1])
    is_there = query.is_cuda or isinstance(query, FakeTensor)
    return is_there and query.dtype in DTYPES and width <= (widest(query.device) if query.is_cuda else 256)


@functools.cache
def widest(device: torch.device) -> int:
    """Largest head dim that the device's kernel has, backward pass included; 0 without a kernel."""
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return 0
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return 0
    return 192 if capability in {(8, 6), (8, 9)} or capability[0] == 12 else 256


class Call(NamedTuple):
    """Arguments of the operators, and how many of the queries, from the first on, see a key at all."""

    num_seeing: int
    lengths: tuple[Any, ...]
    window: dict[str, int]

    @staticmethod
    def of(documents: Documents, window: int | None) -> Call:
        """Each unit sees its document up to itself, and no more than the window."""
        seen = documents.once(Seen.of, window)
        num_seeing = int((seen.first_U <= seen.last_U).sum())
        right = documents.num_behind + num_seeing - documents.num_keys
        left = -1 if window is None else window - 1 - right
        ends = [*itertools.accumulate(documents.lengths)]
        both = [0, *(min(end, num_seeing) for end in ends)], [0, *(documents.num_behind + end - right for end in ends)]
        both[1][-1] = documents.num_keys
        # Of single queries the kernel folds heads that share keys, and lays out the log-sum-exp otherwise.
        longest = [max(2, *(end - begin for begin, end in itertools.pairwise(each))) for each in both]
        there = torch.tensor(both, dtype=torch.int32).to(documents.device, non_blocking=True)
        seen_by = {"window_size_left": left, "window_size_right": right}
        return Call(num_seeing, (*there, *longest, 0.0, (left, right) == (-1, 0)), seen_by)


def forward(rows: Rows, call: Call, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [U, H, E] and log-sum-exp, float32 [U, H]."""
    width = _width(rows)
    laid_out = (_laid_out(row, width) for row in rows)
    output, lse_HU, *_ = aten._flash_attention_forward(*laid_out, *call.lengths, False, scale=scale, **call.window)  # noqa: SLF001
    # Kept until the backward pass: without the zeros behind narrower values, if there are any.
    return output[..., : rows[2].shape[-1]].contiguous(), lse_HU.T


def backward(rows: Rows, softmax: Rows, call: Call, scale: float) -> list[torch.Tensor]:
    """Gradients of query, key and value; `softmax`, which may be a larger one: its gradient, output and log-sum-exp."""
    (grad_UHE, output_UHE, lse_UH), width, query = softmax, _width(rows), rows[0]
    tensors = (_laid_out(row.to(query.dtype), width) for row in (grad_UHE, *rows, output_UHE))
    # Without dropout its random state is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    arguments = (*tensors, lse_UH.T.contiguous(), *call.lengths, *state)
    grads = aten._flash_attention_backward(*arguments, scale=scale, **call.window)  # noqa: SLF001
    return [grad[..., : row.shape[-1]] for grad, row in zip(grads, rows, strict=True)]


@functools.cache
def reads_tables() -> bool:
    """Tell whether this release of torch's kernel finds keys by a table of pages (2.13 does, 2.11 does not)."""
    arguments = aten._flash_attention_forward.default._schema.arguments  # noqa: SLF001 - private like all of these
    return {"block_table", "num_splits"} <= {each.name for each in arguments}


def refusal_of_pages(dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> str:
    """Say why the kernel cannot read keys and values from the pages of a cache; empty if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if not widest(device):
        return "the GPU has no kernel of FlashAttention"
    if dtype not in DTYPES:
        return f"FlashAttention computes in 16 bits, and the dtype is {dtype}"
    if key_dim != value_dim:
        return f"keys have {key_dim} values and values {value_dim}"
    return f"heads have {key_dim} values, no multiple of 8 up to 256" if key_dim % _STEP or key_dim > 256 else ""


class Pages(NamedTuple):
    """Sequences of a cache, whose newest units attend.

    Attributes:
        ends: int32 [B + 1]: 0, and where each sequence's queries end.
        lengths: int32 [B]: units in the cache, those of the queries included.
        table: int32 [B, W]: pages of the cache. Without `reads_tables` a sequence has one page.
        longest: Queries of a sequence, at most.
    """

    ends: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    longest: int


def from_pages(
    query_UHD: torch.Tensor, cached: tuple[torch.Tensor, ...], pages: Pages, *, scale: float, window: int | None = None
) -> torch.Tensor:
    """Output [U, H, D] of each sequence's newest units over the keys and values [pages, P, K, D] of a cache.

    A sequence's keys are never split among blocks of threads: its output would depend on what else is in the call,
    and torch 2.13 gives wrong ones of split pages (pytorch/pytorch#194167).
    """
    keys, values, longest, right = *cached, pages.longest, 0
    options: dict[str, Any] = {"scale": scale, "seqused_k": pages.lengths}
    most = pages.table.shape[1] * keys.shape[1]
    if reads_tables():
        starts = F.pad(pages.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        options |= {"block_table": pages.table, "num_splits": 1}
        # Of single queries that see all keys the kernel folds heads that share them.
        right = -1 if longest == 1 and window is None else 0
    else:
        starts = F.pad(pages.table[:, 0] * keys.shape[1], (0, 1))
        keys, values, longest = keys.flatten(0, 1), values.flatten(0, 1), max(2, longest)
    left = -1 if window is None else window - 1
    lengths = (pages.ends, starts, longest, most, 0.0, (left, right) == (-1, 0))
    options |= {"window_size_left": left, "window_size_right": right}
    rows = _laid_out(query_UHD, query_UHD.shape[-1]), keys, values
    output_UHD, *_ = aten._flash_attention_forward(*rows, *lengths, False, **options)  # noqa: SLF001
    # It lies like the query, which some models lay out by heads.
    return output_UHD.contiguous()  # type: ignore[no-any-return]


def _width(rows: Rows) -> int:
    width = max(row.shape[-1] for row in rows)
    return width + -width % _STEP


def _laid_out(row: torch.Tensor, width: int) -> torch.Tensor:
    """The row as the kernel reads it: widened by zeros, copied where that or its strides want it."""
    if row.shape[-1] < width:
        return F.pad(row, (0, width - row.shape[-1]))
    is_fit = row.stride(-1) == 1 and not any(step % _STEP for step in (*row.stride()[:-1], row.storage_offset()))
    return row if is_fit else row.contiguous()
