"""An advantage for each turn of a dialogue.

Shape legend: n decisions of one sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from cosmos_algorithm_grpo.advantage import whitened
from cosmos_algorithm_grpo.objective import Objective
from cosmos_core.protocols.algorithm import Estimate, Taken
from cosmos_core.types import Group


class TurnObjective(Objective):
    """An objective whose decisions each count with what is rewarded from their turn on.

    The return of turn k is G_k = r_k + discount · G_{k+1}, r_k being what the environment gave for it, and that of the
    last turn also has what else the sample is rewarded with. G_k is compared with that of the other samples of the
    group in their k-th turn, those that had ended before with that of their last one. So with one reward, at the end,
    and a discount of 1 each decision has its sample's ordinary advantage.

    Source: returns and baselines of REINFORCE, Sutton and Barto 2018, sections 13.3 and 13.4; rewards of turns in place
    of one of the whole, each compared within its group, 2505.11821. Deviations: returns are compared, in place of
    single rewards; samples that have ended stay in the comparison.
    """

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """The rewards, shaped: what turns are worth is `settle`'s to say."""
        return [self._shaped(group) for group in groups]

    def summarise(self, taken: Taken) -> Sequence[float]:
        """The return of each turn, then the number of its decisions."""
        rewards, sizes = [turn.reward for turn in taken.turns] or [0.0], _sizes(taken)
        rewards[-1] += taken.advantage - sum(rewards)
        discount = self._options.turn_discount
        returns = [*itertools.accumulate(rewards[::-1], lambda later, reward: reward + discount * later)][::-1]
        return [*returns, *map(float, sizes)]

    def settle(self, batch: Mapping[int, Sequence[float]]) -> Callable[[Taken], Estimate]:
        """The advantage of each turn at each of its decisions."""
        groups: dict[int, dict[int, Sequence[float]]] = {}
        for place, told in batch.items():
            groups.setdefault(place // self._group_size, {})[place] = told[: len(told) // 2]
        advantages: dict[int, list[float | None]] = {}
        for group in groups.values():
            turns = range(max(map(len, group.values())))
            columns = [self._compared([each[min(turn, len(each) - 1)] for each in group.values()]) for turn in turns]
            rows = zip(group.items(), zip(*columns, strict=True), strict=True)
            advantages |= {place: [*row[: len(returns)]] for (place, returns), row in rows}
        if self._options.scale == "batch":
            sizes = [[int(size) for size in batch[place][len(batch[place]) // 2 :]] for place in advantages]
            values = whitened([*advantages.values()], sizes, eps=self._options.advantage_eps)
            advantages = dict(zip(advantages, values, strict=True))

        def estimate(taken: Taken) -> Estimate:
            assert taken.logprobs_n is not None
            turns = zip(advantages[taken.place], _sizes(taken), strict=True)
            values = [value or 0.0 for value, size in turns for _ in range(size)]
            return Estimate(advantages_n=taken.logprobs_n.new_tensor(values))

        return estimate


def _sizes(taken: Taken) -> list[int]:
    """The number of decisions of each turn."""
    assert taken.logprobs_n is not None
    return [turn.num_decisions for turn in taken.turns] or [len(taken.logprobs_n)]
