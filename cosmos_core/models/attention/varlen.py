"""FlashAttention over documents of any length that lie one after another (CUDA, 16 bits).

These are the operators behind `torch.nn.attention.varlen.varlen_attn`, with the arguments that they have in torch 2.11
and later: called directly they give the log-sum-exp, and take one of a larger softmax in the backward pass.

Of a document's Q queries and F keys the last ones are the same unit: the query q sees the key f if
`-left <= f - (q + F - Q) <= right`, where a `left` of -1 bounds nothing. Every query has to see a key.

Shape legend: U queries, S keys, H heads, K key-value heads, D head dim, E value dim.
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


def _width(rows: Rows) -> int:
    width = max(row.shape[-1] for row in rows)
    return width + -width % _STEP


def _laid_out(row: torch.Tensor, width: int) -> torch.Tensor:
    """The row as the kernel reads it: widened by zeros, copied where that or its strides want it."""
    if row.shape[-1] < width:
        return F.pad(row, (0, width - row.shape[-1]))
    is_fit = row.stride(-1) == 1 and not any(step % _STEP for step in (*row.stride()[:-1], row.storage_offset()))
    return row if is_fit else row.contiguous()
