"""Advantages that need more than rewards: what the models say of each decision, and of the rest of the batch.

Shape legend: n decisions of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from cosmos_core.protocols.algorithm import Algorithm
from cosmos_core.protocols.frozen import FrozenRole

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True, eq=False)
class Taken:
    """What is known of one sequence under the weights that the step starts from. Every tensor is float32 [n].

    Attributes:
        place: Of the sequence in the step's whole batch; those of one group or pair follow each other, in order.
        advantage: What `Algorithm.advantages` gave it; 1 for a demonstration, -1 for a rejected one.
        logprobs_n: Of its decisions (`old_logprobs` says whose they are; None where that is `none`).
        frozen_n: Those of the frozen models that are consulted, by role.
        values_n: The critic's estimates of the return from each decision on; None without a critic.
    """

    place: int
    advantage: float
    logprobs_n: torch.Tensor | None
    frozen_n: Mapping[FrozenRole, torch.Tensor] = attrs.field(factory=dict)
    values_n: torch.Tensor | None = None


@attrs.frozen(kw_only=True, eq=False)
class Estimate:
    """What came of a sequence.

    Attributes:
        advantages_n: float32 [n], the advantage of each decision.
        targets_n: float32 [n], what the loss wants besides, such as returns for a critic; None where nothing.
        metrics: Quantities of the sequence to report; each is averaged over the sequences of the step.
    """

    advantages_n: torch.Tensor
    targets_n: torch.Tensor | None = None
    metrics: Mapping[str, float] = attrs.field(factory=dict)


@runtime_checkable
class Estimating(Algorithm, Protocol):
    """An algorithm whose advantages depend on log-probs or values, or on other sequences' of the batch.

    Sequences of a batch lie in many processes: each tells the others of its own in a few numbers, then settles them.
    Sequences that are skipped (`skips_zero_advantage`) take no part.
    """

    def summarise(self, taken: Taken) -> Sequence[float]:
        """What others need to know of a sequence: as many numbers for each, in float64."""
        ...

    def settle(self, batch: Mapping[int, Sequence[float]]) -> Callable[[Taken], Estimate]:
        """Settle a batch: once a step, in each process that has sequences of it.

        Args:
            batch: What `summarise` gave of each sequence of the whole batch, by its place and in the order of places.

        Returns:
            What settles a sequence of the batch; it is asked of those of this process, in any order.
        """
        ...


@runtime_checkable
class Valuing(Algorithm, Protocol):
    """An algorithm that needs a critic: `Taken.values_n`, and `Decisions.values_N` to train it."""

    @property
    def needs_critic(self) -> bool:
        """Whether it does, with these options; a recipe without `[critic]` is then refused."""
        ...
