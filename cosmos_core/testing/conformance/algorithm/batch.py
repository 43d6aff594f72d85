"""A step's batch made of numbers alone.

No model and no token is involved: an algorithm sees log-probs of decisions, whatever was decided.

Shape legend: N decisions of the whole batch or of a part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, get_args

import attrs
import numpy as np
import torch

from cosmos_core.policy.batches.batch import Counts, TrainSequence
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, FrozenRole, Taken, Valuing
from cosmos_core.testing.conformance.algorithm.calls import consulted
from cosmos_core.types import Array, Payload

_STRENGTHS: Final = {
    "rollouts": (1.0, -0.5, 0.25, -1.5, 0.75, -0.125),
    "demonstrations": (1.0,),
    "preferences": (1.0, -1.0),
}

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
            values_n=self.values_N[places] if is_judged(algorithm) else None,
        )

    def counts(self) -> Counts:
        """Counts of the whole batch."""
        return Counts(sequences=len(self.lengths), decisions=sum(self.lengths), trained=len(self.lengths))


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


def is_judged(algorithm: Algorithm) -> bool:
    """Whether the algorithm needs a critic."""
    return isinstance(algorithm, Valuing) and algorithm.needs_critic


def _array(values: np.ndarray) -> Array:
    return Array(dtype=str(values.dtype), shape=values.shape, data=values.tobytes())
