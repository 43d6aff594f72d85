"""The output layer: from hidden states to log-probabilities of the tokens taken, entropies and divergences.

Only places that decide something pass through the output layer, and over a large vocabulary they do so in chunks
whose logits are recomputed in the backward pass, so that no [N, V] float32 tensor is ever held. Under `tp` each process
has the logits of its part of the vocabulary, and only sums, maxima and picked values of rows travel.

Source: arXiv:1909.08053 section 3 (parallel cross entropy).

Shape legend: N decisions, D hidden size, V vocabulary (of this process, where it is split), K tokens told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

from cosmos_core.models.parallel.collectives import sum_over_group
from cosmos_core.models.parallel.forwards import substituted
from cosmos_core.models.parallel.tensor import local_parameters
from cosmos_core.protocols import Decided
from cosmos_core.protocols.frozen import Blended, Comparison, Divergence, KLTarget


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
    return -logprobs_NV.exp().mul_(logprobs_NV).nan_to_num_(0.0).sum(-1)


CHUNK_ELEMENTS: Final = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Largest number of logits held at once, by device: 128 MiB and 1 GiB in float32."""


def most_logits(device: torch.device) -> int:
    """Largest number of logits held at once: in float32 no more than a 128th of a GPU's memory, if there is one."""
    most = CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]
    if device.type != "cuda" or not torch.cuda.is_available():
        return most
    fitting = torch.cuda.get_device_properties(device).total_memory // (4 * 128)
    # A power of two: GPUs of one kind differ by some pages, and processes of one vocabulary take as many rows at once.
    return min(most, 1 << fitting.bit_length() - 1)


_PART: Final = "_cosmos_vocabulary"


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
    prediction_for: Divergence | None = None,
    kl_target: KLTarget | None = None,
    output: torch.nn.Module | None = None,
) -> Decided:
    """Log-probability of each target, after the temperature, and what else is asked for.

    `logits` gives [n, V] for [n, D], of the tokens in `vocabulary`. The entropy is detached; for a divergence in
    `prediction_for` the likeliest tokens are given, and for a `kl_target` the divergence from it. If `logits` calls an
    `output` layer, the gradients that chunks give its weight are added up in float32.
    """
    theirs = {} if kl_target is None else kl_target.prediction
    num_tokens = total(vocabulary) if prediction_for is not None else 0
    num_told = min(num_tokens, prediction_for.top or num_tokens) if prediction_for is not None else 0
    is_whole = num_told == num_tokens

    def one(hidden: torch.Tensor, targets: torch.Tensor, *compared: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = logits(hidden).float()
        scores = scores if temperature == 1.0 else scores / temperature
        rows = rows_of(scores, vocabulary)
        del scores
        given = [rows.pick(targets[:, None])[:, 0]]
        if with_entropy:
            given.append(rows.entropy())
        if prediction_for is not None:
            given += [rows.whole(num_tokens)] if is_whole else rows.likeliest(num_told)
        if compared:
            assert kl_target is not None
            logprobs, *ids = compared
            ours = rows.pick(*ids) if ids else rows.whole(logprobs.shape[-1])
            given.append(diverge(divergence_of(kl_target.comparison), ours, logprobs, is_whole=not ids))
        return tuple(given)

    each = (hidden_ND, targets_N, *(theirs[name] for name in ("logprobs", "ids") if name in theirs))
    num_rows = max(1, most_logits(hidden_ND.device) // vocabulary.most)
    if len(targets_N) <= num_rows:
        given = list(one(*each))
    else:
        chunks = zip(*(torch.split(tensor, num_rows) for tensor in each), strict=True)
        call = one if output is None else _summed(one, output)
        parts = [checkpoint(call, *chunk, use_reentrant=False) for chunk in chunks]
        given = [torch.cat(part) for part in zip(*parts, strict=True)]
    return Decided(
        logprobs_N=given.pop(0),
        entropy_N=given.pop(0) if with_entropy else None,
        # Ids are left out where all tokens are told apart, in their order.
        prediction=None
        if prediction_for is None
        else {"logprobs": given.pop(0).detach(), **({} if is_whole else {"ids": given.pop(0)})},
        divergence_N=given.pop(0) if theirs else None,
    )


Evaluate = Callable[..., tuple[torch.Tensor, ...]]


def _summed(one: Evaluate, output: torch.nn.Module) -> Evaluate:
    """The evaluation of a chunk, in which the weight of the output layer gives its gradient to a sum of all chunks."""
    sums: list[torch.Tensor] = []
    weight: torch.Tensor = _Whole.apply(local_parameters(output)["weight"], sums)  # type: ignore[no-untyped-call]

    def evaluate_chunk(*chunk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with substituted(output, {"weight": _OfChunk.apply(weight, sums)}):  # type: ignore[no-untyped-call]
            return one(*chunk)

    return evaluate_chunk


class _Whole(torch.autograd.Function):
    """The weight; its gradient is the sum, which the engine casts to the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, sums: list[torch.Tensor]) -> torch.Tensor:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[torch.Tensor | None, None]:
        return (ctx.sums.pop() if ctx.sums else None), None


class _OfChunk(_Whole):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None]:
        if ctx.sums and grad is not None:
            ctx.sums[0] += grad
        elif grad is not None:
            ctx.sums.append(grad.float())
        return None, None


_LEAST_REST: Final = 1e-7
"""Least probability of all tokens that are not told apart: rounding may leave none, or less."""


def divergence_of(comparison: Comparison) -> Divergence:
    """The comparison, of a model that computes divergences alone: planning refuses whatever else an algorithm asks."""
    assert isinstance(comparison, Divergence), f"{comparison} of a model that declares no blends"
    return comparison


def diverge(
    divergence: Divergence, logprobs_NK: torch.Tensor, theirs_NK: torch.Tensor, *, is_whole: bool
) -> torch.Tensor:
    """The divergence at each decision, float32 [N], of the policy's log-probabilities from a frozen model's.

    Where these are not of all tokens (`is_whole`), what is left of each distribution counts as one more.
    """
    ours, theirs = (logs if is_whole else _with_rest(logs) for logs in (logprobs_NK, theirs_NK))
    match divergence.kind:
        case "forward-kl":
            return _kl(theirs, ours)
        case "reverse-kl":
            return _kl(ours, theirs)
        case "jsd":
            beta = divergence.beta
            mixture = torch.logaddexp(theirs + math.log(beta), ours + math.log1p(-beta))
            return beta * _kl(theirs, mixture) + (1.0 - beta) * _kl(ours, mixture)


def _with_rest(logs_NK: torch.Tensor) -> torch.Tensor:
    rest_N1 = (1.0 - logs_NK.exp().sum(-1, keepdim=True)).clamp_min(_LEAST_REST).log()
    return torch.cat([logs_NK, rest_N1], -1)


def _kl(logs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """KL(a || b) of rows of log-probabilities; an outcome that a never takes adds nothing."""
    ratio = (logs - others).masked_fill(logs == -math.inf, 0.0)
    return (logs.exp() * ratio).sum(-1)


def _flatten(record: Decided | Blended) -> tuple[list[object], type[Decided | Blended]]:
    return [getattr(record, field.name) for field in attrs.fields(type(record))], type(record)


def _unflatten(values: Iterable[Any], kind: type[Decided | Blended]) -> Decided | Blended:
    return kind(**{field.name: value for field, value in zip(attrs.fields(kind), values, strict=True)})


for _record in (Decided, Blended):
    register_pytree_node(_record, _flatten, _unflatten)


def sliced(kl_target: KLTarget | None, own: Callable[[torch.Tensor], torch.Tensor]) -> KLTarget | None:
    """The target of some of the decisions; `own` takes these out of [N, ...]."""
    if kl_target is None:
        return None
    arrays = {name: own(tensor) for name, tensor in kl_target.prediction.items()}
    return attrs.evolve(kl_target, prediction=arrays)
