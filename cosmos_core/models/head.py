"""The output layer: from hidden states to log-probabilities of the tokens taken, entropies and divergences.

Only places that decide something pass through the output layer, and over a large vocabulary they do so in chunks
whose logits are recomputed in the backward pass, so that no [N, V] float32 tensor is ever held.

Shape legend: N decisions, D hidden size, V vocabulary (of this process, where it is split), K tokens told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import torch
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

    Args:
        logits: Gives [n, V] for [n, D].
        hidden_ND: Hidden state at each decision.
        targets_N: int64, the token taken.
        vocabulary: The tokens that the logits are of.
        temperature: Divides the logits.
        with_entropy: Whether to give the entropy (detached).
        prediction_for: The divergence for which to give the likeliest tokens.
        kl_target: What to give the divergence from.
    """
    theirs = None if kl_target is None else Likeliest.of(kl_target.prediction)
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

    compared = () if theirs is None else (theirs.logprobs_NK, theirs.ids_NK)
    each = (hidden_ND, targets_N, *(tensor for tensor in compared if tensor is not None))
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
        prediction=None
        if prediction_for is None
        else Likeliest(logprobs_NK=given.pop(0).detach(), ids_NK=None if is_whole else given.pop(0)).prediction(),
        divergence_N=given.pop(0) if theirs is not None else None,
    )


def _divide(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits_NV if temperature == 1.0 else logits_NV / temperature


DIVERGENCES: Final[frozenset[DivergenceKind]] = frozenset({"forward-kl", "reverse-kl", "jsd"})
"""Those that every language model of transformers can compute."""

_LEAST_REST: Final = 1e-7
"""Least probability of all tokens that are not told apart: rounding may leave none, or less."""


@attrs.frozen(kw_only=True, eq=False)
class Likeliest:
    """The prediction of a language model: of each decision, the tokens that it finds likeliest.

    Attributes:
        logprobs_NK: float32.
        ids_NK: int64, the likeliest first; None where these are all there are, in their order.
    """

    logprobs_NK: torch.Tensor
    ids_NK: torch.Tensor | None

    def prediction(self) -> Mapping[str, torch.Tensor]:
        """As algorithms and trainers pass it on."""
        ids = {} if self.ids_NK is None else {"ids": self.ids_NK}
        return {"logprobs": self.logprobs_NK, **ids}

    @staticmethod
    def of(prediction: Mapping[str, torch.Tensor]) -> Likeliest:
        """Read the prediction that another language model gave."""
        return Likeliest(logprobs_NK=prediction["logprobs"], ids_NK=prediction.get("ids"))


def divergence_of(comparison: Comparison) -> Divergence:
    """The comparison, of a model that computes divergences alone: planning refuses whatever else an algorithm asks."""
    assert isinstance(comparison, Divergence), f"{comparison} of a model that declares no blends"
    return comparison


def diverge(
    divergence: Divergence, logprobs_NK: torch.Tensor, theirs_NK: torch.Tensor, *, is_whole: bool
) -> torch.Tensor:
    """The divergence at each decision, float32 [N].

    Args:
        divergence: Which.
        logprobs_NK: The policy's log-probabilities of tokens; they carry the gradient.
        theirs_NK: The frozen model's, of the same tokens.
        is_whole: Whether these are all tokens; else what is left of each distribution counts as one more.
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


_PREDICTION: Final = "prediction."


@attrs.frozen(kw_only=True, eq=False)
class Asked:
    """Arguments of a forward (see `cosmos_core.protocols.Model.decide`)."""

    temperature: float
    with_entropy: bool = False
    prediction_for: Comparison | None = None
    kl_target: KLTarget | None = None
    with_features: bool = False


def tensors_of(decided: Decided) -> dict[str, torch.Tensor]:
    """The tensors [N, ...] that there are, by name."""
    own = {
        "logprobs_N": decided.logprobs_N,
        "entropy_N": decided.entropy_N,
        "divergence_N": decided.divergence_N,
        "features_ND": decided.features_ND,
        **({} if decided.blended is None else attrs.asdict(decided.blended, recurse=False)),
    }
    shown = {} if decided.prediction is None else decided.prediction
    return {name: tensor for name, tensor in own.items() if tensor is not None} | {
        _PREDICTION + name: tensor for name, tensor in shown.items()
    }


def decided_of(tensors: Mapping[str, torch.Tensor]) -> Decided:
    """The reverse of `tensors_of`."""
    shown = {name.removeprefix(_PREDICTION): each for name, each in tensors.items() if name.startswith(_PREDICTION)}
    blended = None
    if "squared_NK" in tensors:
        blended = Blended(squared_NK=tensors["squared_NK"], absolute_NK=tensors["absolute_NK"])
    return Decided(
        logprobs_N=tensors["logprobs_N"],
        entropy_N=tensors.get("entropy_N"),
        prediction=shown or None,
        divergence_N=tensors.get("divergence_N"),
        blended=blended,
        features_ND=tensors.get("features_ND"),
    )


def sliced(kl_target: KLTarget | None, own: Callable[[torch.Tensor], torch.Tensor]) -> KLTarget | None:
    """The target of some of the decisions; `own` takes these out of [N, ...]."""
    if kl_target is None:
        return None
    arrays = {name: own(tensor) for name, tensor in kl_target.prediction.items()}
    return attrs.evolve(kl_target, prediction=arrays)
