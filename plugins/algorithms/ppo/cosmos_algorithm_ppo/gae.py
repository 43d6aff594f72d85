"""Generalised advantage estimation."""

from __future__ import annotations

from collections.abc import Sequence


def generalised_advantages(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float
) -> list[float]:
    """The advantage of each decision of an episode.

    A_t = Σ_l (g λ)^l δ_{t+l} with δ_t = r_t + g V_{t+1} - V_t; nothing comes after the last decision.

    Args:
        rewards: r, one a decision.
        values: V, the critic's estimate of the return from each decision on, before it is taken.
        gamma: g, the discount.
        lam: λ; 1 takes the whole return, 0 the next value.

    Source: 1506.02438, equations 11 and 16.
    """
    advantages, following, advantage = [0.0] * len(rewards), 0.0, 0.0
    for place in range(len(rewards) - 1, -1, -1):
        difference = rewards[place] + gamma * following - values[place]
        advantage = difference + gamma * lam * advantage
        advantages[place], following = advantage, values[place]
    return advantages
