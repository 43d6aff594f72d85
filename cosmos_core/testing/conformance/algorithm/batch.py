"""A trainer's step on a batch that is made of numbers: lay out, price, weigh, add up.

Shape legend: N decisions of the whole batch or of a micro-batch, n of one sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, get_args

import attrs
import torch

from cosmos_core.policy.batches.batch import Counts
from cosmos_core.policy.training.microbatch import decision_weights
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Decisions, Loss
from cosmos_core.protocols.algorithm import AdvantageEstimator, Taken
from cosmos_core.protocols.frozen import Blend, Blended, Divergence, FrozenOutput, FrozenRole
from cosmos_core.testing.conformance.algorithm.calls import consulted, price, settled, summarised

_LENGTHS: Final = (5, 1, 3, 7, 2, 4)
_ADVANTAGES: Final = {
    "rollouts": (1.0, -0.5, 0.25, -1.5, 0.75, -0.125),
    "demonstrations": (1.0,) * 6,
    "preferences": (1.0, -1.0) * 3,
}
_EXTREME_LOGPROBS: Final = (0.0, -1e-3, -30.0, -100.0)
"""exp() of a float32 overflows at 88.7; a decision may become that unlikely, or have been."""
_EXTREME_ADVANTAGES: Final = {**_ADVANTAGES, "rollouts": (0.0, 1.0, -1.0, 1e-6, 1e3, -1e3)}
_LEAST_ERROR: Final = 1e-2
"""Of a regression: nothing is learned from one that is met exactly."""


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Everything that a step trains on, and what a model would say of it; tensors are float32.

    Attributes:
        lengths: Decisions of each sequence.
        advantages: Of each sequence.
        logprobs_N: Under the current weights.
        old_logprobs_N: Under the weights at the start of the step.
        behaviour_logprobs_N: Under the weights that generated; zeros for demonstrations.
        entropy_N: Of each decision.
        frozen_N: Log-probs under frozen models, by role.
        values_N: A critic's.
        strength: What advantages are multiplied by once they are all known.
    """

    lengths: tuple[int, ...]
    advantages: tuple[float, ...]
    logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    behaviour_logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    frozen_N: Mapping[FrozenRole, torch.Tensor]
    values_N: torch.Tensor
    strength: float = 1.0

    def of_sequences(self, values: Sequence[float]) -> torch.Tensor:
        """[N], a number of each sequence at each of its decisions."""
        return torch.tensor(values).repeat_interleave(torch.tensor(self.lengths))

    def places(self, sequences: Iterable[int], part: slice = slice(None)) -> torch.Tensor:
        """int64, where the decisions of some sequences lie, or a part of those of each."""
        places = torch.split(torch.arange(len(self.logprobs_N)), [*self.lengths])
        return torch.cat([places[index][part] for index in sequences])

    def old(self, algorithm: Algorithm) -> torch.Tensor | None:
        """[N], the old log-probs that the algorithm asks for."""
        known = {"behaviour": self.behaviour_logprobs_N, "recompute": self.old_logprobs_N}
        return known.get(algorithm.old_logprobs)

    def values(self, algorithm: Algorithm) -> torch.Tensor | None:
        """[N], a critic's values, if the algorithm needs one."""
        return self.values_N if algorithm.needs_critic else None

    def taken(self, algorithm: Algorithm) -> list[Taken]:
        """The sequences before the step, as an algorithm that estimates advantages is told of them."""
        old_N, values_N = self.old(algorithm), self.values(algorithm)
        return [
            Taken(
                place=index,
                advantage=advantage,
                logprobs_n=_at(old_N, places_n),
                frozen_n={role: self.frozen_N[role][places_n] for role in consulted(algorithm)},
                values_n=_at(values_N, places_n),
            )
            for index, advantage in enumerate(self.advantages)
            for places_n in [self.places([index])]
        ]


@attrs.frozen(kw_only=True, eq=False)
class Priced:
    """Decisions that were priced."""

    decisions: Decisions
    loss: Loss

    def gradient(self, weights_N: torch.Tensor | None = None) -> torch.Tensor:
        """The gradient of the sum of prices, weighed if asked for, with respect to each decision's log-prob."""
        loss_N = self.loss.loss_N
        weights_N = torch.ones_like(loss_N) if weights_N is None else weights_N
        (gradient_N,) = torch.autograd.grad(
            loss_N, self.decisions.logprobs_N, weights_N, retain_graph=True, materialize_grads=True
        )
        return gradient_N

    def situation(self, place: int) -> str:
        """A decision in words, for people."""
        values = {
            "advantage": self.decisions.advantages_N,
            "log-prob": self.decisions.logprobs_N,
            "old log-prob": self.decisions.old_logprobs_N,
            "behaviour log-prob": self.decisions.behaviour_logprobs_N,
            **{f"{role} log-prob": output.logprobs_N for role, output in self.decisions.frozen.items()},
        }
        return ", ".join(f"{name} {all_N[place].item():g}" for name, all_N in values.items() if all_N is not None)

    def numbers(self) -> list[list[float]]:
        """Prices and gradients, to be compared."""
        return [self.loss.loss_N.tolist(), self.gradient().tolist()]


def draw(capabilities: AlgorithmCapabilities, *, drift: float = 0.05) -> Batch:
    """A batch of six sequences with random log-probs.

    Args:
        capabilities: Of the algorithm: what its sequences are.
        drift: How far old log-probs lie from the current ones, and those of the behaviour policy from these; 0 is
            on-policy.
    """
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(sum(_LENGTHS), generator=generator)

    logprobs_N = -noise().abs() - 0.1
    old_N = logprobs_N + drift * noise()
    behaviour_N = old_N + drift * noise()
    return Batch(
        lengths=_LENGTHS,
        advantages=_ADVANTAGES[capabilities.source],
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        behaviour_logprobs_N=behaviour_N if capabilities.source == "rollouts" else torch.zeros_like(old_N),
        entropy_N=noise().abs() + 0.1,
        # However near to on-policy: a frozen model is another one.
        frozen_N={role: logprobs_N + 0.3 * noise() for role in get_args(FrozenRole)},
        values_N=noise(),
    )


def extreme(capabilities: AlgorithmCapabilities, advantages: Sequence[float] = ()) -> Batch:
    """A batch with a sequence of each advantage; the decisions of each are far from what made them, in every way."""
    advantages = advantages or _EXTREME_ADVANTAGES[capabilities.source]
    triples_N3 = torch.tensor(list(itertools.product(_EXTREME_LOGPROBS, repeat=3)))
    logprobs_N, old_N, other_N = triples_N3.repeat(len(advantages), 1).T.contiguous()
    return Batch(
        lengths=(len(triples_N3),) * len(advantages),
        advantages=tuple(advantages),
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        behaviour_logprobs_N=other_N if capabilities.source == "rollouts" else torch.zeros_like(other_N),
        entropy_N=logprobs_N.abs(),
        frozen_N={"reference": old_N, "teacher": other_N, "average": old_N},
        values_N=torch.zeros_like(logprobs_N),
    )


def lay_out(
    algorithm: Algorithm, batch: Batch, places_N: torch.Tensor | None = None, leaf_N: torch.Tensor | None = None
) -> Decisions:
    """Lay out a batch's decisions, or those at some places, as the trainer does; `leaf_N` takes the gradient."""
    places_N = torch.arange(len(batch.logprobs_N)) if places_N is None else places_N
    logprobs_N = (batch.logprobs_N.clone().requires_grad_() if leaf_N is None else leaf_N)[places_N]
    advantages_N, targets_N = batch.of_sequences(batch.advantages), None
    if isinstance(algorithm, AdvantageEstimator):
        taken = batch.taken(algorithm)
        estimates = settled(algorithm, summarised(algorithm, taken), taken)
        advantages_N = torch.cat([each.advantages_n for each in estimates]).detach()
        targets = [each.targets_n for each in estimates if each.targets_n is not None]
        targets_N = torch.cat(targets).detach() if targets else None
    own_N, values_N = batch.of_sequences(range(len(batch.lengths)))[places_N], batch.values(algorithm)
    members, sequence_N = torch.unique_consecutive(own_N, return_inverse=True)
    return Decisions(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=batch.behaviour_logprobs_N[places_N],
        old_logprobs_N=_at(batch.old(algorithm), places_N),
        entropy_N=batch.entropy_N[places_N] if algorithm.needs_entropy else None,
        advantages_N=advantages_N[places_N] * batch.strength,
        sequence_N=sequence_N,
        num_sequences=len(members),
        frozen=outputs(algorithm, logprobs_N, {role: all_N[places_N] for role, all_N in batch.frozen_N.items()}),
        targets_N=_at(targets_N, places_N),
        values_N=None if values_N is None else values_N[places_N].requires_grad_(),
    )


def priced(
    algorithm: Algorithm,
    batch: Batch,
    places_N: torch.Tensor | None = None,
    leaf_N: torch.Tensor | None = None,
    *,
    is_imitated: bool = False,
) -> Priced:
    """Price decisions as the trainer does, as rollouts or as demonstrations beside them; the rest is for `lay_out`."""
    laid, name = lay_out(algorithm, batch, places_N, leaf_N), "imitation" if is_imitated else "loss"
    if is_imitated:
        zeros_N, ones_N = torch.zeros_like(laid.advantages_N), torch.ones_like(laid.advantages_N)
        laid = attrs.evolve(laid, behaviour_logprobs_N=zeros_N, advantages_N=ones_N, frozen={})
        laid = attrs.evolve(laid, old_logprobs_N=None, targets_N=None, values_N=None)
    return Priced(decisions=laid, loss=price(algorithm, name, laid))


def trained(
    algorithm: Algorithm, batch: Batch, micro_batches: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train a step on a batch whose decisions lie in micro-batches as their places say.

    Returns:
        Of each decision of the batch, its part of the loss (float64) and the gradient of the loss by its log-prob.
    """
    counts = Counts(sequences=len(batch.lengths), decisions=len(batch.logprobs_N))
    weights = decision_weights(algorithm.aggregation, algorithm.constant_length, batch.lengths, counts)
    # In float64, so that nothing but the prices themselves can differ.
    weights_N, leaf_N = batch.of_sequences(weights).double(), batch.logprobs_N.clone().requires_grad_()
    terms_N = torch.zeros_like(weights_N)
    for places_N in micro_batches:
        loss_N = priced(algorithm, batch, places_N, leaf_N).loss.loss_N * weights_N[places_N]
        loss_N.sum().backward()  # type: ignore[no-untyped-call]
        terms_N[places_N] = loss_N.detach()
    assert leaf_N.grad is not None, "every price carries a gradient"
    return terms_N, leaf_N.grad


def outputs(
    algorithm: Algorithm, logprobs_N: torch.Tensor, frozen_N: Mapping[FrozenRole, torch.Tensor]
) -> dict[FrozenRole, FrozenOutput]:
    """Outputs of the frozen models that the algorithm consults; a comparison is a stand-in that carries a gradient."""
    found = {}
    for role, asked in consulted(algorithm).items():
        other_N, divergence_N, blended = frozen_N[role], None, None
        apart_N = logprobs_N - other_N
        if isinstance(asked, Divergence):
            divergence_N = apart_N.clamp(-20.0, 20.0).square() / 2.0
        elif isinstance(asked, Blend):
            # Of regressions of one number each: an error is the root of minus the log-prob, the other model's near it.
            error_N1 = (-logprobs_N).clamp_min(_LEAST_ERROR**2).sqrt()[:, None]
            near_N1 = (error_N1 * (-0.1 * apart_N.clamp(-5.0, 5.0)).exp()[:, None]).detach()
            shares_K = logprobs_N.new_tensor(asked.shares)
            errors_NK = shares_K * error_N1 + (1.0 - shares_K) * near_N1
            blended = Blended(squared_NK=errors_NK.square(), absolute_NK=errors_NK.detach().abs())
        found[role] = FrozenOutput(logprobs_N=other_N, divergence_N=divergence_N, blended=blended)
    return found


def _at(values_N: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor | None:
    return None if values_N is None else values_N[places]
