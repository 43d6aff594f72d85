"""How far two distributions over a vocabulary are apart, from the log-probabilities of some of its tokens.

Shape legend: N decisions, K tokens told apart at each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import attrs
import torch

from cosmos_core.protocols import Comparison, Divergence, DivergenceKind

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
        """From a prediction that another language model gave."""
        return Likeliest(logprobs_NK=prediction["logprobs"], ids_NK=prediction.get("ids"))


def divergence_of(comparison: Comparison) -> Divergence:
    """What a model is asked that computes divergences alone: planning refuses whatever else an algorithm asks."""
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
