"""The entry point `ppo`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import attrs
from attrs import validators as check

from cosmos_algorithm_grpo.advantage import Whitening
from cosmos_algorithm_grpo.kl import kl_estimate
from cosmos_algorithm_ppo.gae import generalised_advantages
from cosmos_core.config import option
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import (
    Algorithm,
    AlgorithmCapabilities,
    AlgorithmContext,
    Decisions,
    Loss,
    PlainAlgorithm,
    Provider,
    hookimpl,
)
from cosmos_core.protocols.algorithm import Estimate, Taken
from cosmos_core.protocols.objectives import clipped_surrogate, log_ratio, refuse_recomputed
from cosmos_core.types import Group

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class PpoOptions:
    """Options of `ppo`."""

    clip: float = option(0.2, help="The ratio counts within 1 ± this.", validator=check.gt(0.0), dynamic=True)
    gamma: float = option(
        1.0, help="Discount of what comes a decision later.", validator=check.and_(check.gt(0.0), check.le(1.0))
    )
    lam: float = option(
        0.95,
        help="How far advantages look before they trust the critic: 1 to the end, 0 one decision.",
        validator=check.and_(check.ge(0.0), check.le(1.0)),
    )
    value_weight: float = option(
        0.5, help="Factor of half the critic's squared error in the loss.", validator=check.gt(0.0)
    )
    whiten: bool = option(True, help="Whether advantages are brought to mean 0 and deviation 1 over the batch.")
    kl_weight: float = option(
        0.0,
        help="Reward that a decision loses by its divergence from the reference; above 0 it needs `[reference]`.",
        validator=check.ge(0.0),
        dynamic=True,
    )
    old_logprobs: Literal["behaviour", "recompute"] = option(
        "behaviour",
        help="What the ratio compares with: `behaviour`, the weights that generated each token, corrects for stale "
        "samples; `recompute`, the weights at the start of the step, is for samples of these very weights.",
    )


class Ppo(PlainAlgorithm):
    """Clipped policy gradient with the advantages of a critic, and the critic's own regression.

    What an environment gave for a turn counts at the turn's last decision, and what else the sample is rewarded with at
    the sample's; with `kl_weight`, each decision pays log π - log π_ref. The critic learns A + V, the returns that λ
    makes of it.

    Source: 1707.06347, equations 7 and 9; advantages 1506.02438; the divergence in the reward 1909.08593, equation 2.
    Deviations: half the critic's squared error counts, and it is not clipped, as a batch is trained on once; a sample
    that was cut off counts as one that ended.

    Raises:
        ConfigError: The options do not fit the recipe.
    """

    needs_critic = True

    def __init__(self, options: PpoOptions, context: AlgorithmContext) -> None:
        uncorrected = refuse_recomputed(context) if options.old_logprobs == "recompute" else None
        if uncorrected is not None:
            raise ConfigError(f"algorithm.options.{uncorrected}")
        self.old_logprobs = options.old_logprobs
        self.consults = {"reference": None} if options.kl_weight > 0.0 else {}
        self._options = options

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """The rewards: what they are worth is `settle`'s to say."""
        return [[sample.reward if sample.is_scored else None for sample in group.samples] for group in groups]

    def summarise(self, taken: Taken) -> Sequence[float]:
        """The number of decisions, the sum of their advantages and that of the squares."""
        advantages = self._advantages(taken)
        return [float(len(advantages)), math.fsum(advantages), math.fsum(each * each for each in advantages)]

    def settle(self, batch: Mapping[int, Sequence[float]]) -> Callable[[Taken], Estimate]:
        """The advantage of each decision, whitened, and the return that its value is drawn to."""
        whiten = Whitening([*batch.values()], eps=1e-8) if self._options.whiten else None

        def estimate(taken: Taken) -> Estimate:
            values_n, raw = _values(taken), self._advantages(taken)
            returns = [advantage + value for advantage, value in zip(raw, values_n.tolist(), strict=True)]
            metrics = {"return": taken.advantage}
            if "reference" in taken.frozen_n and len(raw):
                metrics["reference_kl"] = float(self._divergence(taken).mean())
            return Estimate(
                advantages_n=values_n.new_tensor(raw if whiten is None else [whiten(each) for each in raw]),
                targets_n=values_n.new_tensor(returns),
                metrics=metrics,
            )

        return estimate

    def loss(self, decisions: Decisions) -> Loss:
        """The surrogate's price, and the critic's error."""
        assert decisions.old_logprobs_N is not None
        assert decisions.values_N is not None
        assert decisions.targets_N is not None
        priced = clipped_surrogate(
            log_ratio(decisions.logprobs_N, decisions.old_logprobs_N),
            decisions.advantages_N,
            low=self._options.clip,
            high=self._options.clip,
        )
        error_N = (decisions.values_N - decisions.targets_N).square()
        return Loss(
            loss_N=priced.loss_N + 0.5 * self._options.value_weight * error_N,
            metrics={
                **priced.metrics,
                "value": decisions.values_N.detach(),
                "value_error": error_N.detach(),
            },
        )

    def _advantages(self, taken: Taken) -> list[float]:
        """Before whitening."""
        values = _values(taken).tolist()
        rewards = [0.0] * len(values)
        if self._options.kl_weight > 0.0:
            rewards = [-self._options.kl_weight * each for each in self._divergence(taken).tolist()]
        if rewards:
            place = -1
            for turn in taken.turns:
                place += turn.num_decisions
                rewards[max(place, 0)] += turn.reward
            rewards[-1] += taken.advantage - sum(turn.reward for turn in taken.turns)
        return generalised_advantages(rewards, values, gamma=self._options.gamma, lam=self._options.lam)

    def _divergence(self, taken: Taken) -> torch.Tensor:
        """log π - log π_ref of each decision, float64."""
        assert taken.logprobs_n is not None
        return kl_estimate(taken.logprobs_n.double(), taken.frozen_n["reference"].double(), "k1")


def _values(taken: Taken) -> torch.Tensor:
    assert taken.values_n is not None, "the trainer gives values to what needs a critic"
    return taken.values_n.detach()


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide proximal policy optimisation."""
    return Provider(
        create=Ppo,
        options=PpoOptions,
        capabilities=AlgorithmCapabilities(
            payload_kinds=frozenset({"tokens"}), logprob_semantics=frozenset({"processed"})
        ),
    )
