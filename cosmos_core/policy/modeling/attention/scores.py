"""Causal attention over runs of documents, on one process.

Plain scores go through SDPA. A soft cap or attention sinks, which SDPA has neither of, are computed in full, in
blocks of queries that the backward pass computes again, so that at most one block's scores are held.

Shape legend: U units, B documents of a run, T their longest length, S the keys of each, H heads, K key-value heads,
G = H / K heads that share one, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch.utils.checkpoint import checkpoint

from cosmos_core.policy.modeling.attention.documents import Packing, Run

BLOCK_SCORES: Final = 1 << 26
"""Most scores of an explicit softmax that are held at once (256 MiB in float32)."""


Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query [U, H, D], key [U, K, D] and value [U, K, D]; values may be of another width."""


@attrs.frozen(kw_only=True, eq=False)
class Scoring:
    """How scores come from queries and keys.

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
        """Whether SDPA computes it."""
        return self.cap is None and self.sinks_H is None


def attend(rows: Rows, runs: Sequence[Run], packing: Packing, scoring: Scoring) -> torch.Tensor:
    """The output [U, H, D] of attention.

    Args:
        rows: Query, key and value.
        runs: Cover all queries and all keys, in order.
        packing: Keeps the masks.
        scoring: What scores are.
    """
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
    B, T = run.num_documents, run.longest
    if run.pad_BT is not None:
        rows = [row.index_select(0, run.pad_BT) for row in rows]
    query_BHTD, key_BKSD, value_BKSD = (torch.unflatten(row, 0, (B, -1)).transpose(1, 2) for row in rows)
    num_keys = T + run.num_behind
    window = scoring.window if scoring.window is not None and scoring.window < num_keys else None
    needs_mask = window is not None or run.num_behind > 0 or not scoring.is_plain
    mask_TS = packing.mask(T, run.num_behind, window) if needs_mask else None
    if scoring.is_plain:
        num_shared = query_BHTD.shape[1] // key_BKSD.shape[1]
        if mask_TS is not None and num_shared > 1 and query_BHTD.device.type != "cpu":
            # CUDA's kernels that take a mask take no shared heads, and without them all scores would be held.
            key_BKSD, value_BKSD = (row.repeat_interleave(num_shared, dim=1) for row in (key_BKSD, value_BKSD))
        output_BHTD = F.scaled_dot_product_attention(
            query_BHTD,
            key_BKSD,
            value_BKSD,
            attn_mask=mask_TS,
            is_causal=mask_TS is None,
            scale=scoring.scale,
            enable_gqa=query_BHTD.shape[1] != key_BKSD.shape[1],
        )
    else:
        assert mask_TS is not None
        output_BHTD = _explicit(query_BHTD, key_BKSD, value_BKSD, mask_TS, scoring)
    output = output_BHTD.transpose(1, 2).flatten(0, 1)
    return output if run.unpad_U is None else output.index_select(0, run.unpad_U)


def _explicit(
    query_BHTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask_TS: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    B, H, T, _ = query_BHTD.shape
    K, S = key_BKSD.shape[1:3]
    query_BKGTD = torch.unflatten(query_BHTD, 1, (K, H // K))
    rows = max(1, BLOCK_SCORES // (B * H * S))
    if rows >= T:
        return _softmax(query_BKGTD, key_BKSD, value_BKSD, mask_TS, scoring.sinks_H, scoring).flatten(1, 2)
    outputs = []
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        num_keys = S - T + stop
        outputs.append(
            checkpoint(
                _softmax,
                query_BKGTD[:, :, :, start:stop],
                key_BKSD[:, :, :num_keys],
                value_BKSD[:, :, :num_keys],
                mask_TS[start:stop, :num_keys],
                scoring.sinks_H,
                scoring,
                use_reentrant=False,
            )
        )
    return torch.cat(outputs, dim=3).flatten(1, 2)


def _softmax(  # noqa: PLR0917 - checkpoint passes arguments by position
    query_BKGTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask_TS: torch.Tensor,
    sinks_H: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Scores are float32 from the scale on.

    Source: Gemma 2 (arXiv:2408.00118), section 2, for the cap; StreamingLLM (arXiv:2309.17453), section 3.1 with the
    learned score of gpt-oss, for sinks.
    """
    scale = query_BKGTD.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores_BKGTS = (query_BKGTD @ key_BKSD[:, :, None].mT).float() * scale
    if scoring.cap is not None:
        scores_BKGTS = torch.tanh(scores_BKGTS / scoring.cap) * scoring.cap
    scores_BKGTS = scores_BKGTS.masked_fill(~mask_TS, -torch.inf)
    if sinks_H is not None:
        sinks_KG11 = torch.unflatten(sinks_H.float(), 0, query_BKGTD.shape[1:3])[:, :, None, None]
        scores_BKGTS = torch.cat((scores_BKGTS, sinks_KG11.expand(*scores_BKGTS.shape[:-1], 1)), dim=-1)
    weights_BKGTS = torch.softmax(scores_BKGTS, dim=-1)[..., : mask_TS.shape[1]]
    return weights_BKGTS.to(value_BKSD.dtype) @ value_BKSD[:, :, None]
