"""The output layer: from hidden states to log-probabilities of the tokens taken, entropies and divergences.

Only places that decide something pass through the output layer, and over a large vocabulary they do so in chunks
whose logits are recomputed in the backward pass, so that no [N, V] float32 tensor is ever held.

Shape legend: N decisions, D hidden size, V vocabulary (of this process, where it is split), K tokens told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import attrs
import torch
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

from cosmos_core.models.vocabulary import Vocabulary, rows_of, total
from cosmos_core.protocols import Decided
from cosmos_core.protocols.frozen import Blended, Comparison, Divergence, DivergenceKind, KLTarget

CHUNK_ELEMENTS: Final = 1 << 25
"""Largest number of logits held at once (128 MiB in float32)."""

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
) -> Decided:
    """Log-probability of each target, after the temperature, and what else is asked for.

    `logits` gives [n, V] for [n, D], of the tokens in `vocabulary`. The entropy is detached; for a divergence in
    `prediction_for` the likeliest tokens are given, and for a `kl_target` the divergence from it.
    """
    theirs = {} if kl_target is None else kl_target.prediction
    num_tokens = total(vocabulary) if prediction_for is not None else 0
    num_told = min(num_tokens, prediction_for.top or num_tokens) if prediction_for is not None else 0
    is_whole = num_told == num_tokens

    def one(hidden: torch.Tensor, targets: torch.Tensor, *compared: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = rows_of(_divide(logits(hidden).float(), temperature), vocabulary)
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
    num_rows = max(1, CHUNK_ELEMENTS // vocabulary.most)
    if len(targets_N) <= num_rows:
        given = list(one(*each))
    else:
        chunks = zip(*(torch.split(tensor, num_rows) for tensor in each), strict=True)
        parts = [checkpoint(one, *chunk, use_reentrant=False) for chunk in chunks]
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


def _divide(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits_NV if temperature == 1.0 else logits_NV / temperature


DIVERGENCES: Final[frozenset[DivergenceKind]] = frozenset({"forward-kl", "reverse-kl", "jsd"})
"""Those that every language model of transformers can compute."""

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
