"""A step's batch made of numbers alone, and what the trainer makes of it: `know`, `price`, weigh, add up.

No model and no token is involved: an algorithm sees log-probs of decisions, whatever was decided.

Shape legend: N decisions of the whole batch or of a part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias, cast, get_args

import attrs
import numpy as np
import torch

from cosmos_core.policy.batches.batch import Counts, TrainSequence
from cosmos_core.policy.batches.spans import Piece
from cosmos_core.policy.training.beforehand import cut
from cosmos_core.policy.training.objective import Known, know
from cosmos_core.protocols import (
    Algorithm,
    AlgorithmCapabilities,
    Blend,
    Blended,
    Consulting,
    Decided,
    Divergence,
    Estimate,
    Estimating,
    FrozenRole,
    Loss,
    MicroBatch,
    Opinion,
    Question,
    Span,
    Taken,
    Valuing,
)
from cosmos_core.testing.conformance.algorithm.calls import consulted, estimates_of, priced
from cosmos_core.types import Array, Payload

Ranks: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""How a batch is split: of each rank, its micro-batches, each with the indices of its sequences."""

_CPU: Final = torch.device("cpu")
_STRENGTHS: Final = {
    "rollouts": (1.0, -0.5, 0.25, -1.5, 0.75, -0.125),
    "demonstrations": (1.0,),
    "preferences": (1.0, -1.0),
}

_LEAST_ERROR: Final = 1e-2
"""Of a regression: nothing is learned from one that is met exactly."""

EXTREME_LOGPROBS: Final = (0.0, -1e-3, -30.0, -100.0)
"""exp() of a float32 overflows at 88.7; a decision may become that unlikely, or have been."""


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Everything that a step trains on, and what a model would say of it.

    Attributes:
        lengths: Decisions of each sequence.
        advantages: Of each sequence.
        logprobs_N: float32, under the current weights.
        old_logprobs_N: float32, under the weights at the start of the step.
        behaviour_logprobs_N: float32, under the weights that generated; None for demonstrations.
        entropy_N: float32.
        frozen_N: float32, under frozen models, by role.
        values_N: float32, what a critic makes of them.
        payload_kind: Kind of the payloads.
        strength: What advantages are multiplied by once they are all known.
    """

    lengths: tuple[int, ...]
    advantages: tuple[float, ...]
    logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    behaviour_logprobs_N: torch.Tensor | None
    entropy_N: torch.Tensor
    frozen_N: Mapping[FrozenRole, torch.Tensor]
    values_N: torch.Tensor
    payload_kind: str
    strength: float = 1.0

    def advantages_of_decisions(self) -> torch.Tensor:
        """float32 [N], each sequence's advantage at each of its decisions."""
        return torch.tensor(self.advantages).repeat_interleave(torch.tensor(self.lengths))

    def decisions_of(self, sequence: int) -> range:
        """Where the decisions of a sequence lie."""
        start = sum(self.lengths[:sequence])
        return range(start, start + self.lengths[sequence])

    def sequence(self, index: int) -> TrainSequence:
        """A sequence as it comes from a rollout replica, or from the dataset."""
        arrays = {}
        if self.behaviour_logprobs_N is not None:
            values = self.behaviour_logprobs_N[self.decisions_of(index)].numpy()
            versions = np.zeros(self.lengths[index], dtype=np.int32)
            arrays = {"logprobs": _array(values), "versions": _array(versions)}
        payload = Payload(kind=self.payload_kind, arrays=arrays)
        return TrainSequence(payload=payload, advantage=self.advantages[index], place=index)

    def taken(self, index: int, algorithm: Algorithm) -> Taken:
        """What is known of a sequence before the step, as an algorithm that estimates advantages is told."""
        places = torch.tensor(self.decisions_of(index))
        behaviour_N = self.behaviour_logprobs_N
        old_N = {"none": None, "behaviour": behaviour_N, "recompute": self.old_logprobs_N}[algorithm.old_logprobs]
        return Taken(
            place=index,
            advantage=self.advantages[index],
            logprobs_n=None if old_N is None else old_N[places],
            frozen_n={role: self.frozen_N[role][places] for role in consulted(algorithm)},
            values_n=self.values_N[places] if _is_judged(algorithm) else None,
        )

    def counts(self) -> Counts:
        """Counts of the whole batch."""
        return Counts(sequences=len(self.lengths), decisions=sum(self.lengths), trained=len(self.lengths))


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
    frozen: Mapping[FrozenRole, Opinion]
    loss: Loss

    def situation(self, place: int) -> str:
        """What is known of a decision, for people."""
        values = {
            "advantage": self.known.advantages_N,
            "log-prob": self.decided.logprobs_N,
            "old log-prob": self.old_logprobs_N,
            "behaviour log-prob": self.known.behaviour_logprobs_N if self.known.has_behaviour else None,
            **{f"{role} log-prob": opinion.logprobs_N for role, opinion in self.frozen.items()},
        }
        return ", ".join(
            f"{name} {values_N[place].item():g}" for name, values_N in values.items() if values_N is not None
        )


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """What a batch comes to.

    Attributes:
        loss: The weighted sum of all prices.
        magnitude: The weighted sum of their absolute values, which rounding errors are measured by.
        gradient_N: float32, of `loss`, with respect to each decision's log-prob.
    """

    loss: float
    magnitude: float
    gradient_N: torch.Tensor


def draw(
    capabilities: AlgorithmCapabilities,
    *,
    lengths: Sequence[int] = (5, 1, 3, 7, 2, 4),
    drift: float = 0.05,
    seed: int = 0,
) -> Batch:
    """A batch of random log-probs.

    Args:
        capabilities: Of the algorithm: what its sequences are.
        lengths: Decisions of each sequence.
        drift: How far old log-probs lie from the current ones, and those of the behaviour policy from these; 0 is
            on-policy.
        seed: Of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    number = sum(lengths)
    is_generated = capabilities.source == "rollouts"

    def noise() -> torch.Tensor:
        return torch.randn(number, generator=generator)

    logprobs_N = -noise().abs() - 0.1
    old_logprobs_N = logprobs_N + drift * noise()
    behaviour_logprobs_N = old_logprobs_N + drift * noise()
    strengths = itertools.cycle(_STRENGTHS[capabilities.source])
    entropy_N = noise().abs() + 0.1
    return Batch(
        lengths=tuple(lengths),
        advantages=tuple(next(strengths) for _ in lengths),
        logprobs_N=logprobs_N,
        old_logprobs_N=old_logprobs_N,
        behaviour_logprobs_N=behaviour_logprobs_N if is_generated else None,
        entropy_N=entropy_N,
        # However near to on-policy: a frozen model is another one.
        frozen_N={role: logprobs_N + 0.3 * noise() for role in get_args(FrozenRole)},
        values_N=noise(),
        payload_kind=min(capabilities.payload_kinds, default="tokens"),
    )


def extreme(capabilities: AlgorithmCapabilities, *, advantages: Sequence[float]) -> Batch:
    """A batch with a sequence of each advantage; the decisions of each are far from what made them, in every way."""
    triples_N3 = torch.tensor(list(itertools.product(EXTREME_LOGPROBS, repeat=3)))
    logprobs_N, old_logprobs_N, behaviour_logprobs_N = triples_N3.repeat(len(advantages), 1).unbind(1)
    return Batch(
        lengths=(len(triples_N3),) * len(advantages),
        advantages=tuple(advantages),
        logprobs_N=logprobs_N.contiguous(),
        old_logprobs_N=old_logprobs_N.contiguous(),
        behaviour_logprobs_N=behaviour_logprobs_N.contiguous() if capabilities.source == "rollouts" else None,
        entropy_N=logprobs_N.abs(),
        frozen_N={
            "reference": old_logprobs_N.contiguous(),
            "teacher": behaviour_logprobs_N.contiguous(),
            "average": old_logprobs_N.contiguous(),
        },
        values_N=torch.zeros_like(logprobs_N),
        payload_kind=min(capabilities.payload_kinds, default="tokens"),
    )


def price_all(algorithm: Algorithm, batch: Batch) -> Part:
    """Price the whole batch as one micro-batch; its `decided.logprobs_N` takes the gradient."""
    everything = range(len(batch.lengths))
    (whole,) = pieced(batch, [everything], None)
    return _price_part(algorithm, batch, everything, whole, batch.logprobs_N.clone().requires_grad_())


def estimated(algorithm: Estimating, batch: Batch) -> list[Estimate]:
    """What an algorithm that estimates advantages makes of each sequence of a batch."""
    asked = cast("Algorithm", algorithm)
    return estimates_of(algorithm, [batch.taken(index, asked) for index in range(len(batch.lengths))])


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
    chosen = torch.tensor([place for each in members for place in each.of(batch.decisions_of(each.sequence))])
    micro_batch = micro_batch_of(share, members)
    known = know(algorithm, micro_batch, [batch.sequence(index) for index in share], batch.counts(), _CPU)
    if isinstance(algorithm, Estimating):
        estimates = estimated(algorithm, batch)
        known = known.settled([cut(estimates[each.sequence], each) for each in members])
    known = attrs.evolve(known, advantages_N=known.advantages_N * batch.strength)
    entropy_N = batch.entropy_N[chosen] if algorithm.needs_entropy else None
    values_N = batch.values_N[chosen].requires_grad_() if _is_judged(algorithm) else None
    decided = Decided(logprobs_N=leaf_N[chosen], entropy_N=entropy_N, values_N=values_N)
    old_logprobs_N = _old_logprobs(algorithm, batch.old_logprobs_N[chosen], known)
    frozen = opinions(algorithm, decided, {role: values_N[chosen] for role, values_N in batch.frozen_N.items()})
    loss = priced(algorithm, decided, known, old_logprobs_N, frozen)
    return Part(known=known, decided=decided, old_logprobs_N=old_logprobs_N, frozen=frozen, loss=loss)


def micro_batch_of(share: Sequence[int], members: Sequence[Piece]) -> MicroBatch:
    """A micro-batch without inputs, of pieces of a rank's sequences."""
    return MicroBatch(
        sequences=tuple(share.index(each.sequence) for each in members),
        num_decisions=tuple(each.number for each in members),
        num_units=sum(each.number for each in members),
        inputs={},
        spans=tuple(each.span for each in members),
    )


def _is_judged(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, Valuing) and algorithm.needs_critic


def opinions(
    algorithm: Algorithm, decided: Decided, frozen_N: Mapping[FrozenRole, torch.Tensor]
) -> Mapping[FrozenRole, Opinion]:
    """What the frozen models that the algorithm consults say; a divergence is a stand-in that carries a gradient."""
    if not isinstance(algorithm, Consulting):
        return {}
    return {role: _opinion(asked, decided, frozen_N[role]) for role, asked in algorithm.consults.items()}


def _opinion(asked: Question | None, decided: Decided, values_N: torch.Tensor) -> Opinion:
    match asked:
        case None:
            return Opinion(logprobs_N=values_N)
        case Divergence():
            divergence_N = (decided.logprobs_N - values_N).clamp(-20.0, 20.0).square() / 2.0
            return Opinion(logprobs_N=values_N, divergence_N=divergence_N)
        case Blend():
            return Opinion(logprobs_N=values_N, blended=_blended(asked, decided.logprobs_N, values_N))


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


def _array(values: np.ndarray) -> Array:
    return Array(dtype=str(values.dtype), shape=values.shape, data=values.tobytes())
