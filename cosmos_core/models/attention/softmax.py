"""The softmax of causal attention, on one process: over blocks of keys, which are merged, and over runs of documents.

Plain scores go through SDPA; within a window of long documents piece by piece, so that neither scores nor masks grow
with the square of their length. A soft cap or attention sinks, which SDPA has neither of, are one block, whose scores
the backward pass computes again. Blocks are merged one by one; sinks are one more key, which has no value.

The backward pass of a block is given the output and the log-sum-exp of the *whole* softmax, of which the block is one
part: that makes its gradients terms of a sum. Kernels of blocks: SDPA's flash kernels on CPUs and, in 16 bits and for
the head dims that they have, on CUDA; elsewhere, and for windows that cut the block and soft caps, scores in full, for
some queries at once, and only of keys that these see. Measured on a CPU, soft-capped attention over 4,096 units is four
times faster in pieces of a million scores than in pieces of 16 million.

Log-sum-exps and gradients are *accumulated*: float32, or the inputs' dtype where that is wider.

Source: FlashAttention-2 (arXiv:2307.08691), equation 3.1, for merging; StreamingLLM (arXiv:2309.17453), section 3.1,
with the learned score of gpt-oss, for sinks; Gemma 2 (arXiv:2408.00118), section 2, for the cap.

Shape legend: U units, B documents that lie alike, T their longest length, Q queries of each, F or S its keys, H heads,
K key-value heads, G = H / K heads that share one, D head dim, E = D + value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch.autograd.function import once_differentiable

from cosmos_core.models.attention.documents import Packing, Run

Kernel: TypeAlias = Literal["cpu", "cuda", "full"]

PIECE_SCORES: Final[Mapping[str, int]] = {"cpu": 1 << 20}
"""Most scores that are held at once, so that they stay in the cache; kernels are dearer on accelerators."""
ACCELERATOR_PIECE_SCORES: Final = 1 << 25
FEWEST_QUERIES: Final = 16
"""Taken at once, however many keys they see."""
NARROW_WINDOW: Final = 128
"""Queries that are taken at once, if scores allow, of a window that is narrower."""

aten = torch.ops.aten


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

    def block(self, query_BQHD: torch.Tensor, both_BFKE: torch.Tensor, num_behind: int) -> Block:
        """Some queries and some keys, the first key `num_behind` units before the first query."""
        return Block(query_BQHD=query_BQHD, both_BFKE=both_BFKE, num_behind=num_behind, scoring=self)


@attrs.frozen(kw_only=True, eq=False)
class Block:
    """Queries, and keys and values side by side.

    Attributes:
        query_BQHD: The queries.
        both_BFKE: The keys and values.
        num_behind: Units from the first key to the first query. The query q sees the key f if
            `0 <= num_behind + q - f < window`.
        scoring: Of the scores; sinks are merged, and no part of a block.
    """

    query_BQHD: torch.Tensor
    both_BFKE: torch.Tensor
    num_behind: int
    scoring: Scoring

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.query_BQHD.shape[-1] ** -0.5 if self.scoring.scale is None else self.scoring.scale

    @property
    def value_dim(self) -> int:
        """Width of a value."""
        return self.both_BFKE.shape[-1] - self.query_BQHD.shape[-1]

    @property
    def accumulated(self) -> torch.dtype:
        """Dtype of log-sum-exps and gradients."""
        return torch.promote_types(self.query_BQHD.dtype, torch.float32)

    @property
    def is_causal(self) -> bool:
        """Tell whether keys and queries are the same units, and each sees all before it."""
        num_queries = self.query_BQHD.shape[1]
        is_cut = self.scoring.window is not None and self.scoring.window < num_queries
        return self.num_behind == 0 and num_queries == self.both_BFKE.shape[1] and not is_cut

    @property
    def is_open(self) -> bool:
        """Tell whether every query sees every key."""
        is_cut = self.scoring.window is not None and self.scoring.window < self.num_behind + self.query_BQHD.shape[1]
        return self.num_behind >= self.both_BFKE.shape[1] - 1 and not is_cut

    def heads_apart(self) -> tuple[torch.Tensor, ...]:
        """Query, key and value, each [B, H, ·, D]: heads repeated, values widened by zeros to D."""
        D = self.query_BQHD.shape[-1]
        group = self.query_BQHD.shape[2] // self.both_BFKE.shape[2]
        key, value = torch.split(self.both_BFKE, [D, self.value_dim], dim=-1)
        value = F.pad(value, (0, D - self.value_dim))
        rows = (self.query_BQHD, *(row.repeat_interleave(group, dim=2) for row in (key, value)))
        return tuple(row.transpose(1, 2).contiguous() for row in rows)

    def seen(self, queries: range, keys: range) -> torch.Tensor:
        """bool [Q, F], of some of the queries and some of the keys."""
        query_Q, key_F = (
            torch.arange(part.start, part.stop, device=self.query_BQHD.device) for part in (queries, keys)
        )
        distance_QF = self.num_behind + query_Q[:, None] - key_F
        seen_QF = distance_QF >= 0
        return seen_QF if self.scoring.window is None else seen_QF & (distance_QF < self.scoring.window)

    def pieces(self) -> Iterator[tuple[range, range]]:
        """Queries that are taken at once, and the keys that any of them sees."""
        (B, num_queries, H, _), num_keys = self.query_BQHD.shape, self.both_BFKE.shape[1]
        width = num_keys if self.scoring.window is None else min(num_keys, 2 * self.scoring.window)
        scores = PIECE_SCORES.get(self.query_BQHD.device.type, ACCELERATOR_PIECE_SCORES)
        most = max(scores // (B * H * max(width, 1)), FEWEST_QUERIES)
        if self.scoring.window is not None:
            most = min(most, max(self.scoring.window, NARROW_WINDOW))
        for start in range(0, num_queries, most):
            stop = min(start + most, num_queries)
            first = 0 if self.scoring.window is None else max(self.num_behind + start - self.scoring.window + 1, 0)
            last = min(self.num_behind + stop, num_keys)
            yield range(start, stop), range(min(first, last), last)


def kernel_of(block: Block) -> Kernel:
    """The kernel that computes a block."""
    query = block.query_BQHD
    if block.scoring.cap is not None or block.value_dim > query.shape[-1] or not (block.is_causal or block.is_open):
        return "full"
    if query.device.type == "cpu":
        return "cpu"
    # The head dims of the flash kernel of CUDA; SDPA itself would pad others.
    is_fit = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return "cuda" if query.is_cuda and is_fit and query.dtype in {torch.float16, torch.bfloat16} else "full"


def block_forward(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Q, H, value dim], and accumulated log-sum-exp [B, Q, H], of the softmax over the block's keys.

    Where a query sees no key of the block, its output is zero and its log-sum-exp minus infinity.
    """
    query_BQHD = block.query_BQHD
    if not query_BQHD.numel():
        return query_BQHD[..., : block.value_dim], query_BQHD.new_empty(query_BQHD.shape[:3], dtype=block.accumulated)
    kernel = kernel_of(block)
    if kernel == "full":
        return _full_forward(block)
    # SDPA itself gives no log-sum-exp.
    name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if kernel == "cpu" else "")
    flash = getattr(aten, name)
    output, lse, *_ = flash(*block.heads_apart(), dropout_p=0.0, is_causal=block.is_causal, scale=block.scale)
    return output.transpose(1, 2)[..., : block.value_dim], lse.transpose(1, 2).to(block.accumulated)


def block_backward(
    block: Block, grad_BQHD: torch.Tensor, output_BQHD: torch.Tensor, lse_BQH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulated gradients of the queries [B, Q, H, D], and of keys and values side by side [B, F, K, E].

    The output, its gradient and its log-sum-exp are those of the whole softmax.
    """
    if not block.query_BQHD.numel():
        query, both = (torch.zeros_like(row, dtype=block.accumulated) for row in (block.query_BQHD, block.both_BFKE))
        return query, both
    kernel = kernel_of(block)
    if kernel == "full":
        return _full_backward(block, grad_BQHD, output_BQHD, lse_BQH)
    padding = block.query_BQHD.shape[-1] - block.value_dim
    grad, output = (F.pad(row, (0, padding)).transpose(1, 2).contiguous() for row in (grad_BQHD, output_BQHD))
    tensors = (grad, *block.heads_apart(), output, lse_BQH.transpose(1, 2).contiguous())
    if kernel == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001 - see the forward
            *tensors, 0.0, block.is_causal, scale=block.scale
        )
    else:
        grads = _cuda_backward(block, tensors)
    grad_query, grad_key, grad_value = (part.transpose(1, 2).to(block.accumulated) for part in grads)
    both = torch.cat((grad_key, grad_value[..., : block.value_dim]), dim=-1)
    return grad_query, torch.unflatten(both, 2, (block.both_BFKE.shape[2], -1)).sum(3)


def _cuda_backward(block: Block, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    query, key = tensors[1:3]
    # Without dropout its random state is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    lengths = (None, None, query.shape[2], key.shape[2])
    backward = aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001 - see the forward
    return tuple(backward(*tensors, *lengths, 0.0, block.is_causal, state, state[:0], scale=block.scale))


def _full_forward(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, lses = [], []
    for piece in block.pieces():
        query, key, value = _piece(block, *piece)
        scores, _ = _scores(block, piece, query, key)
        lse = scores.logsumexp(-1)
        # Of queries that see no key, all scores are minus infinity.
        weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp()
        outputs.append(_queries_first(block, weights.to(value.dtype) @ value))
        lses.append(_queries_first(block, lse[..., None])[..., 0])
    return torch.cat(outputs, dim=1), torch.cat(lses, dim=1)


def _full_backward(
    block: Block, grad_BQHD: torch.Tensor, output_BQHD: torch.Tensor, lse_BQH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    D, accumulated = block.query_BQHD.shape[-1], block.accumulated
    grad_both = torch.zeros_like(block.both_BFKE, dtype=accumulated)
    grad_queries = []
    for piece in block.pieces():
        query, key, value = (row.to(accumulated) for row in _piece(block, *piece))
        rows = (row[:, piece[0].start : piece[0].stop] for row in (grad_BQHD, output_BQHD, lse_BQH[..., None]))
        grad, output, lse = (_heads_first(block, row).to(accumulated) for row in rows)
        scores, bent = _scores(block, piece, query, key)
        weights = (scores - lse).exp()
        grad_scores = weights * (grad @ value.mT - (grad * output).sum(-1, keepdim=True)) * block.scale
        grad_scores = grad_scores if bent is None else grad_scores * (1 - bent.square())
        grad_queries.append(_queries_first(block, grad_scores @ key))
        own = grad_both[:, piece[1].start : piece[1].stop]
        own[..., :D] += (grad_scores.mT @ query).transpose(1, 2)
        own[..., D:] += (weights.mT @ grad).transpose(1, 2)
    return torch.cat(grad_queries, dim=1), grad_both


def _piece(block: Block, queries: range, keys: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [B, K, G·Q, D], key [B, K, F, D] and value [B, K, F, ·] of a piece."""
    D = block.query_BQHD.shape[-1]
    query = _heads_first(block, block.query_BQHD[:, queries.start : queries.stop])
    both = block.both_BFKE[:, keys.start : keys.stop].transpose(1, 2)
    return query, both[..., :D], both[..., D:]


def _heads_first(block: Block, rows_BQHD: torch.Tensor) -> torch.Tensor:
    """[B, K, G·Q, ·]: queries of heads that share keys lie together."""
    return torch.unflatten(rows_BQHD, 2, (block.both_BFKE.shape[2], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _queries_first(block: Block, rows_BKRD: torch.Tensor) -> torch.Tensor:
    group = block.query_BQHD.shape[2] // block.both_BFKE.shape[2]
    return torch.unflatten(rows_BKRD, 2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(
    block: Block, piece: tuple[range, range], query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Accumulated scores [B, K, G·Q, F], minus infinity where a key is not seen; under a cap also their tanh."""
    # Never in place: a product may be kept for when the layer is computed again.
    scores = (query @ key.mT).to(block.accumulated) * block.scale
    bent = None
    if block.scoring.cap is not None:
        bent = scores.div_(block.scoring.cap).tanh_()
        scores = bent * block.scoring.cap
    if not block.is_open:
        torch.unflatten(scores, 2, (-1, len(piece[0]))).masked_fill_(~block.seen(*piece), -torch.inf)
    return scores, bent


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
    if scoring.cap is None and scoring.sinks_H is None:
        parts = [row.transpose(1, 2) for row in (query_BTHD, key_BSKD, value_BSKD)]
        output_BTHD = _plain(parts, run.num_behind, packing, scoring).transpose(1, 2)
    else:
        both_BSKE = torch.cat((key_BSKD, value_BSKD), dim=-1)
        output_BTHD = _Explicit.apply(query_BTHD, both_BSKE, scoring.sinks_H, run.num_behind, scoring)  # type: ignore[no-untyped-call]
    output = output_BTHD.flatten(0, 1)
    return output if run.unpad_U is None else output.index_select(0, run.unpad_U)


def _plain(parts: Sequence[torch.Tensor], num_behind: int, packing: Packing, scoring: Scoring) -> torch.Tensor:
    """Run SDPA on query [B, H, T, D], key and value [B, K, S, D], once or in pieces no shorter than the window."""
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
