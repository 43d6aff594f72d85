"""Rows of log-probabilities over a vocabulary, whole or split over processes.

Under tensor parallelism each process has the logits of its part of the vocabulary, and only sums, maxima and picked
values of rows travel.

Source: arXiv:1909.08053 section 3 (parallel cross entropy).

Shape legend: N decisions, V vocabulary (of this process, where it is split), K tokens of each row.
"""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist

from cosmos_core.models.parallel.collectives import sum_over_group


@attrs.frozen(kw_only=True, eq=False)
class Vocabulary:
    """This process's part of a vocabulary that is split over `group`, which is None where it is whole.

    Its first token is `start`; it has `size`, and the largest part `most`, for which all processes take as many
    decisions at once.
    """

    start: int
    size: int
    most: int = attrs.field(default=attrs.Factory(lambda self: self.size, takes_self=True))
    group: dist.ProcessGroup | None = None


def rows_of(logits_NV: torch.Tensor, vocabulary: Vocabulary) -> WholeRows | SplitRows:
    """The distributions of rows of logits; the same on each process of the group."""
    if vocabulary.group is None:
        return WholeRows(torch.log_softmax(logits_NV, dim=-1))
    return SplitRows(logits_NV, vocabulary, vocabulary.group)


def total(vocabulary: Vocabulary) -> int:
    """Tokens of the whole vocabulary; every process of its group asks together."""
    if vocabulary.group is None:
        return vocabulary.size
    device = "cuda" if dist.get_backend(vocabulary.group) == "nccl" else "cpu"
    sizes = torch.tensor([vocabulary.size], device=device)
    dist.all_reduce(sizes, group=vocabulary.group)
    return int(sizes.item())


class WholeRows:
    """Rows that this process has whole, as log-probabilities in float32."""

    def __init__(self, logprobs_NV: torch.Tensor) -> None:
        self._logprobs_NV = logprobs_NV

    def pick(self, ids_NK: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [N, K] of tokens; they carry the gradient."""
        return self._logprobs_NV.gather(-1, ids_NK)

    def whole(self, num_tokens: int) -> torch.Tensor:
        """Log-probabilities [N, K] of all tokens, of which there are so many, in order; they carry the gradient."""
        assert num_tokens == self._logprobs_NV.shape[-1], "models of other vocabularies are compared by no whole one"
        return self._logprobs_NV

    def entropy(self) -> torch.Tensor:
        """Entropy [N], detached."""
        return _entropy(self._logprobs_NV.detach())

    def likeliest(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [N, K] of so many tokens, the likeliest first, and their ids, detached."""
        logprobs_NK, ids_NK = self._logprobs_NV.detach().topk(number, dim=-1)
        return logprobs_NK, ids_NK


class SplitRows:
    """Rows of which this process has a part, as float32 logits of its tokens."""

    def __init__(self, logits_NV: torch.Tensor, vocabulary: Vocabulary, group: dist.ProcessGroup) -> None:
        highest_N = logits_NV.detach().amax(-1)
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
        self._vocabulary = vocabulary
        self._group = group
        self._shifted_NV = logits_NV - highest_N[:, None]
        self._normalizer_N = sum_over_group(self._shifted_NV.exp().sum(-1), group).log()

    def pick(self, ids_NK: torch.Tensor) -> torch.Tensor:
        """See `WholeRows.pick`."""
        places_NK = ids_NK - self._vocabulary.start
        is_absent_NK = (places_NK < 0) | (places_NK >= self._vocabulary.size)
        own_NK = self._shifted_NV.gather(-1, places_NK.masked_fill(is_absent_NK, 0)).masked_fill(is_absent_NK, 0.0)
        return sum_over_group(own_NK, self._group) - self._normalizer_N[:, None]

    def whole(self, num_tokens: int) -> torch.Tensor:
        """See `WholeRows.whole`."""
        start, size = self._vocabulary.start, self._vocabulary.size
        padded_NK = torch.nn.functional.pad(self._shifted_NV, (start, num_tokens - start - size))
        return sum_over_group(padded_NK, self._group) - self._normalizer_N[:, None]

    def entropy(self) -> torch.Tensor:
        """See `WholeRows.entropy`."""
        entropy_N = _entropy(self._own())
        dist.all_reduce(entropy_N, group=self._group)
        return entropy_N

    def likeliest(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `WholeRows.likeliest`."""
        vocabulary, size = self._vocabulary, dist.get_world_size(self._group)
        most = min(number, vocabulary.most)
        logprobs, places = self._own().topk(min(most, vocabulary.size), dim=-1)
        padding = (0, most - logprobs.shape[1])
        logprobs = torch.nn.functional.pad(logprobs, padding, value=-torch.inf).contiguous()
        ids = torch.nn.functional.pad(places + vocabulary.start, padding).contiguous()
        all_logprobs, all_ids = ([torch.empty_like(own) for _ in range(size)] for own in (logprobs, ids))
        dist.all_gather(all_logprobs, logprobs, group=self._group)
        dist.all_gather(all_ids, ids, group=self._group)
        logprobs_NK, places_NK = torch.cat(all_logprobs, -1).topk(number, dim=-1)
        return logprobs_NK, torch.cat(all_ids, -1).gather(-1, places_NK)

    def _own(self) -> torch.Tensor:
        return self._shifted_NV.detach() - self._normalizer_N.detach()[:, None]


def _entropy(logprobs_NV: torch.Tensor) -> torch.Tensor:
    return -(logprobs_NV.exp() * logprobs_NV).nan_to_num(0.0).sum(-1)
