"""From hidden states to the log-probabilities of the tokens that were taken.

Only places that decide something pass through the output layer, and over a large vocabulary they do so in chunks
whose logits are recomputed in the backward pass, so that no [N, V] float32 tensor is ever held. Under tensor
parallelism each process has the logits of its part of the vocabulary, and only sums and maxima of rows travel.

Source: arXiv:1909.08053 section 3 (parallel cross entropy).

Shape legend: N decisions, D hidden size, V vocabulary (of this process, where it is split).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from cosmos_core.policy.mesh.collectives import sum_over_group
from cosmos_core.protocols import Decided

CHUNK_ELEMENTS: Final = 1 << 25
"""Largest number of logits held at once (128 MiB in float32)."""

_PART: Final = "_cosmos_vocabulary"


@attrs.frozen(kw_only=True, eq=False)
class Vocabulary:
    """This process's part of a vocabulary that is split over a group.

    Attributes:
        start: Its first token.
        size: Its tokens.
        most: Those of the largest part, which all processes take as many decisions at once for.
        group: The processes; None where it is whole.
    """

    start: int
    size: int
    most: int = attrs.field(default=attrs.Factory(lambda self: self.size, takes_self=True))
    group: dist.ProcessGroup | None = None


def vocabulary_of(module: torch.nn.Module) -> Vocabulary:
    """The tokens whose logits the module's output layer gives on this process."""
    output: torch.nn.Linear = module.get_output_embeddings()  # type: ignore[operator]
    part: Vocabulary | None = output.__dict__.get(_PART)
    return Vocabulary(start=0, size=output.weight.shape[0]) if part is None else part


def note_part(output: torch.nn.Module, part: Vocabulary) -> None:
    """Remember which part of the vocabulary an output layer gives the logits of."""
    output.__dict__[_PART] = part


def plain_logits(module: torch.nn.Module, hidden_ND: torch.Tensor) -> torch.Tensor:
    """The output layer with the scales and caps that transformers' architectures apply to its result.

    Gives [N, V]; under tensor parallelism of the part that `vocabulary_of` says.
    """
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
    vocabulary: Vocabulary,
    temperature: float,
    with_entropy: bool,
) -> Decided:
    """Log-probability of each target, after the temperature, and the entropy if asked for.

    Args:
        logits: Gives [n, V] for [n, D].
        hidden_ND: Hidden state at each decision.
        targets_N: int64, the token taken.
        vocabulary: The tokens that the logits are of.
        temperature: Divides the logits.
        with_entropy: Whether to give the entropy (detached).
    """

    def one(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled_NV = _divide(logits(hidden).float(), temperature)
        if vocabulary.group is not None:
            return _split_log_probs(scaled_NV, targets, vocabulary, vocabulary.group, with_entropy=with_entropy)
        log_probs = torch.log_softmax(scaled_NV, dim=-1)
        detached = log_probs.detach()
        entropy = -(detached.exp() * detached).nan_to_num(0.0).sum(-1) if with_entropy else detached[:, 0]
        return log_probs.gather(-1, targets[:, None])[:, 0], entropy

    rows = max(1, CHUNK_ELEMENTS // vocabulary.most)
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


def _split_log_probs(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    vocabulary: Vocabulary,
    group: dist.ProcessGroup,
    *,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy, of a vocabulary split over a group; the same on each process."""
    highest_N = logits_NV.detach().amax(-1)
    dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
    shifted_NV = logits_NV - highest_N[:, None]
    normalizer_N = sum_over_group(shifted_NV.exp().sum(-1), group).log()
    place_N = targets_N - vocabulary.start
    is_own_N = (place_N >= 0) & (place_N < vocabulary.size)
    own_N = shifted_NV.gather(-1, place_N.masked_fill(~is_own_N, 0)[:, None])[:, 0].masked_fill(~is_own_N, 0.0)
    log_probs_N = sum_over_group(own_N, group) - normalizer_N
    if not with_entropy:
        return log_probs_N, log_probs_N.detach()
    detached_NV = shifted_NV.detach() - normalizer_N.detach()[:, None]
    entropy_N = -(detached_NV.exp() * detached_NV).nan_to_num(0.0).sum(-1)
    dist.all_reduce(entropy_N, group=group)
    return log_probs_N, entropy_N
