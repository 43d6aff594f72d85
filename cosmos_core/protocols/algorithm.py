"""The protocol of algorithm plugins: admit groups, give advantages, price decisions.

A loss is given per decision and never summed by the algorithm: the trainer weighs each decision so
that the result does not depend on how the batch was split over micro-batches, ranks or replicas.

Shape legend: N decisions of a micro-batch (all its sequences, one after another), S its sequences.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from cosmos_core.protocols.frozen import Comparison, FrozenOutput, FrozenRole
from cosmos_core.protocols.world import DecisionKind
from cosmos_core.types import Group

if TYPE_CHECKING:
    import torch


Source: TypeAlias = Literal["rollouts", "demonstrations", "preferences"]
"""`preferences` are demonstrations in pairs: one to imitate, one rejected, two sequences of one row."""
OldLogprobs: TypeAlias = Literal["none", "behaviour", "recompute"]

CORE_METRICS: Final = frozenset(
    {
        "loss",
        "entropy",
        "behaviour_kl",
        "mismatch_kl",
        "mismatch_max_ratio",
        "grad_norm",
        "critic_grad_norm",
        "lr",
        "units",
        "prompt_units",
        "sequences",
        "trained_sequences",
        "skipped_sequences",
        "nonfinite",
        "mfu",
        "memory_bytes",
        "memory_reserved_bytes",
    }
)
"""What the core measures of a step; besides, all names that end in `_s` are seconds, and all that begin with
`imitation_` are of demonstrations beside rollouts (`Algorithm.imitation`)."""


def is_core_metric(name: str) -> bool:
    """True if a metric is the core's own: an algorithm's may not have its name, or two quantities would be mixed."""
    return name in CORE_METRICS or name.endswith("_s") or name.startswith("imitation_")


class Aggregation(enum.StrEnum):
    """Aggregation of per-decision losses over the global batch (all replicas, ranks, micro-batches)."""

    TOKEN_MEAN = "token-mean"
    """Sum over decisions / number of decisions."""
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence-mean-token-mean"
    """Mean over sequences of each sequence's mean over decisions."""
    SEQUENCE_MEAN_TOKEN_SUM = "sequence-mean-token-sum"
    """Sum over decisions / (number of sequences · a constant length)."""


@attrs.frozen(kw_only=True)
class AlgorithmContext:
    """The parts of the recipe that an algorithm may need to know.

    Attributes:
        group_size: Samples of each prompt (1 for demonstrations, 2 for preferences).
        temperature: Sampling temperature.
        max_units: Longest completion.
        max_staleness: `sync.max_staleness`.
        generates_average: Whether rollouts come from the average of the weights (`policy.average.publish`).
    """

    group_size: int
    temperature: float
    max_units: int
    max_staleness: int
    generates_average: bool = False


@attrs.frozen(kw_only=True)
class AlgorithmCapabilities:
    """Properties and needs of an algorithm; `cosmos plan` refuses a recipe that does not meet them.

    Attributes:
        source: Where its batches come from.
        payload_kinds: Kinds of payload it can price.
        decisions: Of rollouts of latents, the decisions that it can price. The log-prob of a transition is that of a
            probability; of a regression it is minus a squared error, and no ratio of policies can be made of it.
        min_group_size: Fewest samples of a prompt that its estimator needs.
        logprob_semantics: Engine log-prob semantics that it can use as the behaviour policy's.
        needs_rewards: Whether rollouts must be scored; else a recipe may have no rewards, and each sample's is 0.
    """

    source: Source = "rollouts"
    payload_kinds: frozenset[str] = frozenset({"tokens", "latents"})
    decisions: frozenset[DecisionKind] = frozenset({"transitions"})
    min_group_size: int = 1
    logprob_semantics: frozenset[str] = frozenset({"processed"})
    needs_rewards: bool = True


@attrs.frozen(kw_only=True, eq=False)
class Decisions:
    """The decisions of one micro-batch. Every tensor but `logprobs_N` is detached.

    Attributes:
        logprobs_N: float32, under the current weights; carries the gradient.
        behaviour_logprobs_N: float32, the engine's, at the weights that generated; zeros for demonstrations.
        old_logprobs_N: float32, those that `Algorithm.old_logprobs` names; None for `none`.
        entropy_N: float32, or None unless `needs_entropy`.
        advantages_N: float32, each sequence's advantage at each of its decisions, or an `AdvantageEstimator`'s.
        sequence_N: int64 in [0, S), non-decreasing: the sequence of each decision.
        num_sequences: S.
        frozen: What the frozen models say that the algorithm `consults`, by role.
        targets_N: float32, those of an `AdvantageEstimator`; None where it gives none.
        values_N: float32, the critic's, which carry the gradient; None without a critic.
    """

    logprobs_N: torch.Tensor
    behaviour_logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor | None
    entropy_N: torch.Tensor | None
    advantages_N: torch.Tensor
    sequence_N: torch.Tensor
    num_sequences: int
    frozen: Mapping[FrozenRole, FrozenOutput] = attrs.field(factory=dict)
    targets_N: torch.Tensor | None = None
    values_N: torch.Tensor | None = None


@attrs.frozen(kw_only=True, eq=False)
class Loss:
    """The price of each decision.

    Attributes:
        loss_N: float32; its weighted sum is minimised.
        metrics: Detached float32 [N] per-decision quantities to report; each is averaged over the decisions of the
            step that went through the model. The core's own (`loss`, `entropy`, `behaviour_kl`, …) are refused.
    """

    loss_N: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = attrs.field(factory=dict)


class Algorithm(Protocol):
    """A training objective."""

    @property
    def aggregation(self) -> Aggregation:
        """The way in which the trainer weighs decisions."""

    @property
    def constant_length(self) -> int:
        """The constant of `SEQUENCE_MEAN_TOKEN_SUM`; unused otherwise."""

    @property
    def old_logprobs(self) -> OldLogprobs:
        """The old log-probs of `Decisions`: the engine's, or those of a forward at the start of the step."""

    @property
    def needs_entropy(self) -> bool:
        """True if `Decisions.entropy_N` must be filled."""

    @property
    def skips_zero_advantage(self) -> bool:
        """True if a sequence of advantage 0 has zero gradient: its forward is skipped, denominators still count it."""

    @property
    def consults(self) -> Mapping[FrozenRole, Comparison | None]:
        """The frozen models that say something of its decisions, by role, each with what it needs; None: log-probs.

        A recipe without the table of a role (`[reference]`, `[teacher]`, `[policy.average]`) is refused; the policy
        may be compared with one model.
        """

    @property
    def needs_critic(self) -> bool:
        """True if the recipe's `[critic]` is needed: `Taken.values_n`, and `Decisions.values_N` to train it."""

    @property
    def num_demonstrations(self) -> int:
        """Demonstrations of its row beside each group of rollouts, each with other draws (`WorldModel.noised`); or 0.

        A recipe whose dataset has none is refused.
        """

    def admit(self, group: Group) -> str | None:
        """None to train on the group, else the reason to drop it (dynamic sampling); counted and shown."""

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """The advantage of each sample of each group of the step's whole batch; None for an unscored sample.

        Every replica calls it with the same groups in one order: batch statistics agree. Demonstrations are not passed.
        """

    def loss(self, decisions: Decisions) -> Loss:
        """Price the decisions of a micro-batch."""

    def imitation(self, decisions: Decisions) -> Loss:
        """Price the decisions of a micro-batch of demonstrations beside rollouts, where there are any.

        Each demonstration is weighed over the step's demonstrations alone, as `aggregation` says, and its loss is
        added to that of the rollouts. Their advantages are 1; nothing is known of them but log-probs, and the entropy
        where it is needed. Metrics are reported under names that begin with `imitation_`.
        """


@attrs.frozen(kw_only=True)
class TurnTaken:
    """One turn of a dialogue.

    Attributes:
        num_decisions: Of the sequence's, which are its turns' one after another.
        reward: What the environment gave for it, times its weight.
    """

    num_decisions: int
    reward: float


@attrs.frozen(kw_only=True, eq=False)
class Taken:
    """One sequence under the weights that the step starts from. Every tensor is float32 [n].

    Attributes:
        place: Of the sequence in the step's whole batch; those of one group or pair follow each other, in order.
        advantage: What `Algorithm.advantages` gave it; 1 for a demonstration, -1 for a rejected one.
        logprobs_n: Of its decisions (`old_logprobs` says whose they are; None where that is `none`).
        frozen_n: Those of the frozen models that are consulted, by role.
        values_n: The critic's estimates of the return from each decision on; None without a critic.
        turns: Those of a dialogue of several turns; empty: there is one. What else the sample's reward is made of
            counts after the last.
    """

    place: int
    advantage: float
    logprobs_n: torch.Tensor | None
    frozen_n: Mapping[FrozenRole, torch.Tensor] = attrs.field(factory=dict)
    values_n: torch.Tensor | None = None
    turns: tuple[TurnTaken, ...] = ()


@attrs.frozen(kw_only=True, eq=False)
class Estimate:
    """The advantages and targets of a sequence.

    Attributes:
        advantages_n: float32 [n], the advantage of each decision.
        targets_n: float32 [n], what the loss wants besides, such as returns for a critic; None where nothing.
        metrics: Quantities of the sequence to report; each is averaged over the sequences of the step.
    """

    advantages_n: torch.Tensor
    targets_n: torch.Tensor | None = None
    metrics: Mapping[str, float] = attrs.field(factory=dict)


@runtime_checkable
class AdvantageEstimator(Algorithm, Protocol):
    """An algorithm whose advantages depend on log-probs or values, or on other sequences' of the batch. Optional.

    Sequences of a batch lie in many processes: each tells the others of its own in a few numbers, then settles them.
    Sequences that are skipped (`skips_zero_advantage`) take no part.
    """

    def summarise(self, taken: Taken) -> Sequence[float]:
        """Tell what others need to know of a sequence, as numbers in float64."""

    def settle(self, batch: Mapping[int, Sequence[float]]) -> Callable[[Taken], Estimate]:
        """Settle a batch: once a step, in each process that has sequences of it.

        Args:
            batch: What `summarise` gave of each sequence of the whole batch, by its place and in the order of places.

        Returns:
            What settles a sequence of the batch; it is asked of those of this process, in any order.
        """
