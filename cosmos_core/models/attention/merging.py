"""A softmax over blocks of keys, merged block by block; attention sinks are one more key, which has no value.

Source: FlashAttention-2 (arXiv:2307.08691), equation 3.1, for merging; StreamingLLM (arXiv:2309.17453), section 3.1,
with the learned score of gpt-oss, for sinks.

Shape legend: B documents, Q queries of each, H heads, D value dim.
"""

from __future__ import annotations

import attrs
import torch


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
    """Gradient [H] of the sinks' scores.

    Args:
        sinks_H: The scores.
        grad_BQHD: Gradient of the output of the whole softmax.
        output_BQHD: That output.
        lse_BQH: Its log-sum-exp, the sinks in it.
    """
    if sinks_H is None:
        return None
    weights_BQH = (sinks_H.to(lse_BQH.dtype) - lse_BQH).exp()
    towards_BQH = (grad_BQHD.to(lse_BQH.dtype) * output_BQHD).sum(-1)
    return -(weights_BQH * towards_BQH).sum((0, 1)).to(sinks_H.dtype)
