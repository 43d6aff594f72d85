"""From hidden states to the log-probabilities of the tokens that were taken.

Only places that decide something pass through the output layer, and over a large vocabulary they do so in chunks
whose logits are recomputed in the backward pass, so that no [N, V] float32 tensor is ever held.

Shape legend: N decisions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.utils.checkpoint import checkpoint

from cosmos_core.protocols import Decided

CHUNK_ELEMENTS: Final = 1 << 25
"""Largest number of logits held at once (128 MiB in float32)."""


def plain_logits(module: torch.nn.Module, hidden_ND: torch.Tensor) -> torch.Tensor:
    """The output layer with the scales and caps that transformers' architectures apply to its result."""
    logits_NV: torch.Tensor = module.get_output_embeddings()(hidden_ND)  # type: ignore[operator]
    config = module.config.get_text_config()  # type: ignore[union-attr,operator]
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits_NV = logits_NV * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits_NV = logits_NV / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits_NV = torch.tanh(logits_NV / cap) * cap
    return logits_NV


def evaluate(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    with_entropy: bool,
) -> Decided:
    """Log-probability of each target, after the temperature, and the entropy if asked for.

    Args:
        logits: Gives [n, V] for [n, D].
        hidden_ND: Hidden state at each decision.
        targets_N: int64, the token taken.
        vocab_size: V, to size the chunks.
        temperature: Divides the logits.
        with_entropy: Whether to give the entropy (detached).
    """

    def one(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = torch.log_softmax(_divide(logits(hidden).float(), temperature), dim=-1)
        detached = log_probs.detach()
        entropy = -(detached.exp() * detached).nan_to_num(0.0).sum(-1) if with_entropy else detached[:, 0]
        return log_probs.gather(-1, targets[:, None])[:, 0], entropy

    rows = max(1, CHUNK_ELEMENTS // vocab_size)
    if len(targets_N) <= rows:
        logprobs_N, entropy_N = one(hidden_ND, targets_N)
    else:
        pairs = [
            checkpoint(one, hidden, targets, use_reentrant=False)
            for hidden, targets in zip(torch.split(hidden_ND, rows), torch.split(targets_N, rows), strict=True)
        ]
        logprobs_N, entropy_N = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return Decided(logprobs_N=logprobs_N, entropy_N=entropy_N if with_entropy else None)


def _divide(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits_NV if temperature == 1.0 else logits_NV / temperature
