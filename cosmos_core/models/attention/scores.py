"""Causal attention over runs of documents, on one process.

Plain scores go through SDPA; within a window of long documents piece by piece, so that neither scores nor masks grow
with the square of their length. A soft cap or attention sinks, which SDPA has neither of, are one block of a softmax
(`blocks`), whose scores the backward pass computes again. Blocks are merged one by one; sinks are one more key, which
has no value.

Source: FlashAttention-2 (arXiv:2307.08691), equation 3.1, for merging; StreamingLLM (arXiv:2309.17453), section 3.1,
with the learned score of gpt-oss, for sinks.

Shape legend: U units, B documents of a run, T their longest length, Q queries of each, S the keys of each, H heads,
K key-value heads, D head dim, E = D + value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.function import once_differentiable

from cosmos_core.models.attention.blocks import Block, block_backward, block_forward
from cosmos_core.models.attention.documents import Packing, Run


@attrs.frozen(kw_only=True, eq=False)
class Merged:
    """The softmax over the keys seen so far: its output [B, Q, H, D] and log-sum-exp [B, Q, H], both accumulated."""

    output_BQHD: torch.Tensor
    lse_BQH: torch.Tensor

    @staticmethod
    def of(block: tuple[torch.Tensor, torch.Tensor]) -> Merged:
        """A first block, in which every query sees a key."""
        return Merged(output_BQHD=block[0].to(block[1].dtype), lse_BQH=block[1])

    def with_block(self, block: tuple[torch.Tensor, torch.Tensor]) -> Merged:
        """One more block; the log-sum-exp of queries that see none of its keys is minus infinity."""
        output_BQHD, lse_BQH = block
        total_BQH = torch.logaddexp(self.lse_BQH, lse_BQH)
        old, new = ((part - total_BQH).exp()[..., None] for part in (self.lse_BQH, lse_BQH))
        return Merged(output_BQHD=self.output_BQHD * old + output_BQHD * new, lse_BQH=total_BQH)

    def with_sinks(self, sinks_H: torch.Tensor | None) -> Merged:
        """The keys without a value, which are merged last."""
        if sinks_H is None:
            return self
        total_BQH = torch.logaddexp(self.lse_BQH, sinks_H.to(self.lse_BQH.dtype))
        return Merged(output_BQHD=self.output_BQHD * (self.lse_BQH - total_BQH).exp()[..., None], lse_BQH=total_BQH)


def sinks_backward(
    sinks_H: torch.Tensor | None, grad_BQHD: torch.Tensor, output_BQHD: torch.Tensor, lse_BQH: torch.Tensor
) -> torch.Tensor | None:
    """Gradient [H] of the sinks' scores; output, its gradient and its log-sum-exp are those of the whole softmax."""
    if sinks_H is None:
        return None
    weights_BQH = (sinks_H.to(lse_BQH.dtype) - lse_BQH).exp()
    towards_BQH = (grad_BQHD.to(lse_BQH.dtype) * output_BQHD).sum(-1)
    return -(weights_BQH * towards_BQH).sum((0, 1)).to(sinks_H.dtype)


SMALLEST_PIECE: Final = 128
"""Fewest queries that are worth a call of their own, however narrow the window is."""

Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query [U, H, D], key [U, K, D] and value [U, K, D]; values may be of another width."""


@attrs.frozen(kw_only=True, eq=False)
class Scoring:
    """Settings of the scores of queries and keys.

    Attributes:
        scale: Their factor; None: one over the root of the head dim.
        window: Units that a unit may look back, itself included; None: all of its document.
        cap: Scores become cap · tanh(score / cap).
        sinks_H: The score of a key that every head sees, and that has no value.
    """

    scale: float | None
    window: int | None = None
    cap: float | None = None
    sinks_H: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Tell whether SDPA computes it."""
        return self.cap is None and self.sinks_H is None

    def block(self, query_BQHD: torch.Tensor, both_BFKE: torch.Tensor, num_behind: int) -> Block:
        """Some queries and some keys, the first key `num_behind` units before the first query."""
        scale = query_BQHD.shape[-1] ** -0.5 if self.scale is None else self.scale
        return Block(
            query_BQHD=query_BQHD,
            both_BFKE=both_BFKE,
            num_behind=num_behind,
            scale=scale,
            window=self.window,
            cap=self.cap,
        )


def attend(rows: Rows, runs: Sequence[Run], packing: Packing, scoring: Scoring) -> torch.Tensor:
    """The output [U, H, D] of attention."""
    query_UHD, key_UKD, value_UKD = rows
    num_units = [run.num_units for run in runs]
    num_keys = [run.num_units + run.num_behind for run in runs]
    parts = zip(
        runs,
        torch.split(query_UHD, num_units),
        torch.split(key_UKD, num_keys),
        torch.split(value_UKD, num_keys),
        strict=True,
    )
    outputs = [_attend(run, part, packing, scoring) for run, *part in parts]
    return torch.cat(outputs) if outputs else query_UHD.new_empty((0, query_UHD.shape[1], value_UKD.shape[2]))


def _attend(run: Run, rows: Sequence[torch.Tensor], packing: Packing, scoring: Scoring) -> torch.Tensor:
    if run.pad_BT is not None:
        rows = [row.index_select(0, run.pad_BT) for row in rows]
    query_BTHD, key_BSKD, value_BSKD = (torch.unflatten(row, 0, (run.num_documents, -1)) for row in rows)
    if scoring.is_plain:
        parts = [row.transpose(1, 2) for row in (query_BTHD, key_BSKD, value_BSKD)]
        output_BTHD = _plain(parts, run.num_behind, packing, scoring).transpose(1, 2)
    else:
        both_BSKE = torch.cat((key_BSKD, value_BSKD), dim=-1)
        output_BTHD = _Explicit.apply(query_BTHD, both_BSKE, scoring.sinks_H, run.num_behind, scoring)  # type: ignore[no-untyped-call]
    output = output_BTHD.flatten(0, 1)
    return output if run.unpad_U is None else output.index_select(0, run.unpad_U)


def _plain(parts: Sequence[torch.Tensor], num_behind: int, packing: Packing, scoring: Scoring) -> torch.Tensor:
    """Of query [B, H, T, D], key and value [B, K, S, D]: SDPA, once or for pieces no shorter than the window."""
    query_BHTD, key_BKSD, _ = parts
    num_queries, num_keys, window = query_BHTD.shape[2], key_BKSD.shape[2], scoring.window
    if window is None or num_keys <= 2 * max(window, SMALLEST_PIECE):
        return _sdpa(parts, num_behind, packing, scoring)
    size = max(window, SMALLEST_PIECE)
    sizes = [min(size, num_queries - start) for start in range(0, num_queries, size)]
    queries = torch.split(query_BHTD, sizes, dim=2)
    keys, values = (torch.split(part, [num_behind + sizes[0], *sizes[1:]], dim=2) for part in parts[1:])
    outputs = [_sdpa([queries[0], keys[0], values[0]], num_behind, packing, scoring)]
    for place in range(1, len(sizes)):
        seen = [torch.cat(rows[place - 1 : place + 1], dim=2) for rows in (keys, values)]
        outputs.append(_sdpa([queries[place], *seen], keys[place - 1].shape[2], packing, scoring))
    return torch.cat(outputs, dim=2)


def _sdpa(parts: Sequence[torch.Tensor], num_behind: int, packing: Packing, scoring: Scoring) -> torch.Tensor:
    query_BHTD, key_BKSD, value_BKSD = parts
    num_queries, num_keys = query_BHTD.shape[2], key_BKSD.shape[2]
    window = scoring.window if scoring.window is not None and scoring.window < num_keys else None
    needs_mask = window is not None or num_behind > 0
    mask_TS = packing.mask(num_queries, num_behind, window) if needs_mask else None
    num_shared = query_BHTD.shape[1] // key_BKSD.shape[1]
    if mask_TS is not None and num_shared > 1 and query_BHTD.device.type != "cpu":
        # CUDA's kernels that take a mask take no shared heads, and without them all scores would be held.
        key_BKSD, value_BKSD = (row.repeat_interleave(num_shared, dim=1) for row in (key_BKSD, value_BKSD))
    return F.scaled_dot_product_attention(
        query_BHTD,
        key_BKSD,
        value_BKSD,
        attn_mask=mask_TS,
        is_causal=mask_TS is None,
        scale=scoring.scale,
        enable_gqa=query_BHTD.shape[1] != key_BKSD.shape[1],
    )


class _Explicit(torch.autograd.Function):
    """A softmax over one block of keys, and sinks."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        query_BTHD: torch.Tensor,
        both_BSKE: torch.Tensor,
        sinks_H: torch.Tensor | None,
        num_behind: int,
        scoring: Scoring,
    ) -> torch.Tensor:
        block = scoring.block(query_BTHD, both_BSKE, num_behind)
        merged = Merged.of(block_forward(block)).with_sinks(sinks_H)
        output_BTHD = merged.output_BQHD.to(query_BTHD.dtype)
        ctx.num_behind, ctx.scoring = num_behind, attrs.evolve(scoring, sinks_H=None)
        ctx.save_for_backward(query_BTHD, both_BSKE, sinks_H, output_BTHD, merged.lse_BQH)
        return output_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_BTHD, both_BSKE, sinks_H, *result = ctx.saved_tensors
        block = ctx.scoring.block(query_BTHD, both_BSKE, ctx.num_behind)
        grad_query, grad_both = block_backward(block, grad_BTHD, *result)
        grad_sinks = sinks_backward(sinks_H, grad_BTHD, *result)
        return grad_query.to(query_BTHD.dtype), grad_both.to(both_BSKE.dtype), grad_sinks, None, None
