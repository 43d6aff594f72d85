"""A trainer's step on a batch that is made of numbers: lay out, price, weigh, add up.

Shape legend: N decisions of the whole batch or of a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias, cast

import attrs
import torch

from cosmos_core.policy.training.microbatch import Known, Piece, know
from cosmos_core.policy.training.old_logprobs import cut
from cosmos_core.protocols import Algorithm, Decided, Loss, MicroBatch
from cosmos_core.protocols.algorithm import AdvantageEstimator, Estimate
from cosmos_core.protocols.frozen import Blend, Blended, Comparison, Divergence, FrozenOutput, FrozenRole
from cosmos_core.protocols.model import Span
from cosmos_core.testing.conformance.algorithm.calls import Batch, estimates_of, is_judged, priced, priced_imitation

Ranks: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""How a batch is split: of each rank, its micro-batches, each with the indices of its sequences."""

_CPU: Final = torch.device("cpu")
_LEAST_ERROR: Final = 1e-2
"""Of a regression: nothing is learned from one that is met exactly."""


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """A micro-batch that was priced.

    Attributes:
        known: What was known of its decisions.
        decided: What its forward gave.
        old_logprobs_N: The old log-probs that the algorithm asked for.
        frozen: What frozen models say of them.
        loss: The price of each decision.
    """

    known: Known
    decided: Decided
    old_logprobs_N: torch.Tensor | None
    frozen: Mapping[FrozenRole, FrozenOutput]
    loss: Loss

    def situation(self, place: int) -> str:
        """A decision in words, for people."""
        values = {
            "advantage": self.known.advantages_N,
            "log-prob": self.decided.logprobs_N,
            "old log-prob": self.old_logprobs_N,
            "behaviour log-prob": self.known.behaviour_logprobs_N if self.known.has_behaviour else None,
            **{f"{role} log-prob": output.logprobs_N for role, output in self.frozen.items()},
        }
        return ", ".join(
            f"{name} {values_N[place].item():g}" for name, values_N in values.items() if values_N is not None
        )


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """The loss and gradients that a batch comes to.

    Attributes:
        loss: The weighted sum of all prices.
        magnitude: The weighted sum of their absolute values, which rounding errors are measured by.
        gradient_N: float32, of `loss`, with respect to each decision's log-prob.
    """

    loss: float
    magnitude: float
    gradient_N: torch.Tensor


def price_all(algorithm: Algorithm, batch: Batch) -> Part:
    """Price the whole batch as one micro-batch; its `decided.logprobs_N` takes the gradient."""
    everything = range(len(batch.lengths))
    (whole,) = pieced(batch, [everything], None)
    return _price_part(algorithm, batch, everything, whole, batch.logprobs_N.clone().requires_grad_())


def estimated(algorithm: AdvantageEstimator, batch: Batch) -> list[Estimate]:
    """Estimates by an algorithm that estimates advantages, of each sequence of a batch."""
    asked = cast("Algorithm", algorithm)
    return estimates_of(algorithm, [batch.taken(index, asked) for index in range(len(batch.lengths))])


def as_demonstrations(batch: Batch) -> Batch:
    """The batch as if nobody had generated it."""
    return attrs.evolve(batch, behaviour_logprobs_N=None, advantages=(1.0,) * len(batch.lengths))


def price_demonstrations(
    algorithm: Algorithm, batch: Batch, members: Sequence[int] | None = None
) -> tuple[Loss, torch.Tensor]:
    """The prices of a micro-batch of demonstrations, and the log-probs that they depend on."""
    share = range(len(batch.lengths)) if members is None else members
    (parts,) = pieced(batch, [share], None)
    chosen, known = _laid_out(algorithm, batch, share, parts)
    logprobs_N = batch.logprobs_N[chosen].clone().requires_grad_()
    entropy_N = batch.entropy_N[chosen] if algorithm.needs_entropy else None
    return priced_imitation(algorithm, Decided(logprobs_N=logprobs_N, entropy_N=entropy_N), known), logprobs_N


def gradient_of(part: Part, weights_N: torch.Tensor | None = None) -> torch.Tensor:
    """The gradient of the sum of prices, weighed if asked for, with respect to each decision's log-prob."""
    weights_N = torch.ones_like(part.loss.loss_N) if weights_N is None else weights_N
    (gradient_N,) = torch.autograd.grad(
        part.loss.loss_N, part.decided.logprobs_N, weights_N, retain_graph=True, materialize_grads=True
    )
    return gradient_N


def first_nonfinite(values_N: torch.Tensor) -> int | None:
    """The place of the first value that is no finite number; None if all are."""
    places = torch.nonzero(~torch.isfinite(values_N))
    return int(places[0]) if len(places) else None


def train(algorithm: Algorithm, batch: Batch, ranks: Ranks, *, longest: int | None = None) -> Step:
    """Train a step on a batch that is split over ranks and micro-batches, as the trainer does.

    Args:
        algorithm: Prices it.
        batch: The batch.
        ranks: How it is split.
        longest: Most decisions of a sequence in a micro-batch; None: sequences are whole.
    """
    leaf_N = batch.logprobs_N.clone().requires_grad_()
    loss = magnitude = 0.0
    for micro_batches in ranks:
        share = [index for members in micro_batches for index in members]
        for members in pieced(batch, micro_batches, longest):
            part = _price_part(algorithm, batch, share, members, leaf_N)
            weights_N = part.known.weights_N.double()
            # In float64, so that nothing but the prices themselves can differ.
            total = torch.dot(part.loss.loss_N.double(), weights_N)
            total.backward()  # type: ignore[no-untyped-call]
            loss += float(total.detach())
            magnitude += float(torch.dot(part.loss.loss_N.detach().abs().double(), weights_N))
    assert leaf_N.grad is not None, "every price carries a gradient"
    return Step(loss=loss, magnitude=magnitude, gradient_N=leaf_N.grad)


def pieced(batch: Batch, micro_batches: Sequence[Sequence[int]], longest: int | None) -> Iterator[list[Piece]]:
    """Micro-batches as pieces of sequences; those that are split lie in further micro-batches."""
    for members in micro_batches:
        whole = [batch.lengths[index] for index in members]
        steps = longest or max(whole, default=1)
        for first in range(0, max(whole, default=1), steps):
            yield [
                Piece(sequence=index, number=min(steps, total - first), span=Span(first=first, total=total))
                for index, total in zip(members, whole, strict=True)
                if first < total
            ]


def _price_part(
    algorithm: Algorithm, batch: Batch, share: Sequence[int], members: Sequence[Piece], leaf_N: torch.Tensor
) -> Part:
    """Price a micro-batch; `share` holds the sequences of its rank, which `members` are of."""
    chosen, known = _laid_out(algorithm, batch, share, members)
    if isinstance(algorithm, AdvantageEstimator):
        estimates = estimated(algorithm, batch)
        known = known.settled([cut(estimates[each.sequence], each) for each in members])
    known = attrs.evolve(known, advantages_N=known.advantages_N * batch.strength)
    entropy_N = batch.entropy_N[chosen] if algorithm.needs_entropy else None
    values_N = batch.values_N[chosen].requires_grad_() if is_judged(algorithm) else None
    decided = Decided(logprobs_N=leaf_N[chosen], entropy_N=entropy_N, values_N=values_N)
    old_logprobs_N = _old_logprobs(algorithm, batch.old_logprobs_N[chosen], known)
    frozen = outputs(algorithm, decided, {role: values_N[chosen] for role, values_N in batch.frozen_N.items()})
    loss = priced(algorithm, decided, known, old_logprobs_N, frozen)
    return Part(known=known, decided=decided, old_logprobs_N=old_logprobs_N, frozen=frozen, loss=loss)


def _laid_out(
    algorithm: Algorithm, batch: Batch, share: Sequence[int], members: Sequence[Piece]
) -> tuple[torch.Tensor, Known]:
    """The places of a micro-batch's decisions in the batch, and what is known of them."""
    chosen = torch.tensor([place for each in members for place in each.of(batch.decisions_of(each.sequence))])
    micro_batch = MicroBatch(
        sequences=tuple(share.index(each.sequence) for each in members),
        num_decisions=tuple(each.number for each in members),
        num_units=sum(each.number for each in members),
        inputs={},
        spans=tuple(each.span for each in members),
    )
    return chosen, know(algorithm, micro_batch, [batch.sequence(index) for index in share], batch.counts(), _CPU)


def outputs(
    algorithm: Algorithm, decided: Decided, frozen_N: Mapping[FrozenRole, torch.Tensor]
) -> Mapping[FrozenRole, FrozenOutput]:
    """Outputs of the frozen models that the algorithm consults; a divergence is a stand-in that carries a gradient."""
    return {role: _output(asked, decided, frozen_N[role]) for role, asked in algorithm.consults.items()}


def _output(asked: Comparison | None, decided: Decided, values_N: torch.Tensor) -> FrozenOutput:
    match asked:
        case None:
            return FrozenOutput(logprobs_N=values_N)
        case Divergence():
            divergence_N = (decided.logprobs_N - values_N).clamp(-20.0, 20.0).square() / 2.0
            return FrozenOutput(logprobs_N=values_N, divergence_N=divergence_N)
        case Blend():
            return FrozenOutput(logprobs_N=values_N, blended=_blended(asked, decided.logprobs_N, values_N))


def _blended(blend: Blend, logprobs_N: torch.Tensor, values_N: torch.Tensor) -> Blended:
    """Of regressions of one number each: its error is the root of minus the log-prob, another model's is near it."""
    error_N = (-logprobs_N).clamp_min(_LEAST_ERROR**2).sqrt()
    apart_N = (values_N - logprobs_N.detach()).clamp(-5.0, 5.0)
    other_N = error_N.detach() * (0.1 * apart_N).exp()
    errors = [share * error_N + (1.0 - share) * other_N for share in blend.shares]
    return Blended(
        squared_NK=torch.stack([each.square() for each in errors], 1),
        absolute_NK=torch.stack([each.detach().abs() for each in errors], 1),
    )


def _old_logprobs(algorithm: Algorithm, recomputed_N: torch.Tensor, known: Known) -> torch.Tensor | None:
    """The old log-probs that the algorithm asks for."""
    match algorithm.old_logprobs:
        case "none":
            return None
        case "behaviour":
            return known.behaviour_logprobs_N
        case "recompute":
            return recomputed_N
