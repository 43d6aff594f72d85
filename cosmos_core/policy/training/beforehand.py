"""What is evaluated before a step's first backward: log-probs of old and frozen weights, and what is made of them.

Everything here is under the weights that the step starts from, and computed once for the whole batch.

Shape legend: N decisions of a micro-batch, n of one sequence.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence

import attrs
import torch

from cosmos_core.errors import TrainingError
from cosmos_core.policy.batches.spans import Piece, pieces
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.objective import Known
from cosmos_core.policy.training.preparing import Prepared
from cosmos_core.protocols import (
    Algorithm,
    Comparison,
    Consulting,
    Decided,
    Estimate,
    Estimating,
    FrozenOutput,
    FrozenRole,
    KLTarget,
    Taken,
)


@attrs.frozen(kw_only=True, eq=False)
class Beforehand:
    """What was evaluated of micro-batches; of each, by its index. Empty on a process without the last stage.

    Attributes:
        old: Under the starting weights; empty where the algorithm needs none of it.
        frozen: Of each frozen model.
        asked: The role that the algorithm compares the policy with, and how.
        is_here: Whether this process has the last stage.
    """

    old: Sequence[Decided] = ()
    frozen: Mapping[FrozenRole, Sequence[Decided]] = attrs.field(factory=dict)
    asked: tuple[FrozenRole, Comparison] | None = None
    is_here: bool = True

    def old_logprobs(self, algorithm: Algorithm, known: Known, index: int) -> torch.Tensor | None:
        """The old log-probs [N] of a micro-batch, as the algorithm wants them."""
        match algorithm.old_logprobs:
            case "none":
                return None
            case "behaviour":
                return known.behaviour_logprobs_N
            case "recompute":
                return self.old[index].logprobs_N

    def kl_targets(self) -> list[KLTarget]:
        """What the forward of each micro-batch is compared with."""
        if self.asked is None:
            return []
        role, comparison = self.asked
        looks = [each.prediction for each in self.frozen[role]]
        return [KLTarget(prediction=look, comparison=comparison) for look in looks if look is not None]

    def outputs(self, index: int, decided: Decided) -> dict[FrozenRole, FrozenOutput]:
        """What the frozen models say of a micro-batch, once its forward is known."""
        answering = None if self.asked is None else self.asked[0]
        return {
            role: FrozenOutput(
                logprobs_N=each[index].logprobs_N,
                divergence_N=decided.divergence_N if role == answering else None,
                blended=decided.blended if role == answering else None,
            )
            for role, each in self.frozen.items()
        }


def comparison_of(algorithm: Algorithm) -> tuple[FrozenRole, Comparison] | None:
    """The one frozen model that an algorithm compares the policy with, and how.

    Raises:
        TrainingError: There are several.
    """
    if not isinstance(algorithm, Consulting):
        return None
    asked = [(role, comparison) for role, comparison in algorithm.consults.items() if comparison is not None]
    if len(asked) > 1:
        raise TrainingError(
            f"the algorithm compares the policy with {len(asked)} models: {', '.join(role for role, _ in asked)}; "
            "one is possible"
        )
    return asked[0] if asked else None


def settled(
    algorithm: Estimating, parts: Sequence[tuple[Prepared, Beforehand]], world: World, group: GradientGroup
) -> list[dict[int, Estimate]]:
    """What the algorithm makes of each sequence of each part, by the sequence's index.

    All processes of all replicas of the group call it: they tell each other of their sequences.

    Args:
        algorithm: Whose advantages need more than rewards.
        parts: This process's micro-batches, with what was evaluated of them.
        world: The processes of this replica.
        group: The replicas.

    Raises:
        GradientGroupError: The group broke.
        TrainingError: What the algorithm gives does not fit its sequence.
    """
    taken = [_taken(algorithm, prepared, before) if before.is_here else {} for prepared, before in parts]
    own = [(each.place, [*map(float, algorithm.summarise(each))]) for part in taken for each in part.values()]
    replica = [pair for said in world.exchange(json.dumps(own).encode()) for pair in json.loads(said)]
    everyone = [pair for said in group.exchange(json.dumps(replica).encode()) for pair in json.loads(said)]
    if not any(taken):
        return [{} for _ in parts]
    # In one order everywhere, so that rounding is the same in every process.
    estimate = algorithm.settle(dict(sorted(everyone, key=operator.itemgetter(0))))
    found = [{sequence: _fitting(estimate(each), each) for sequence, each in part.items()} for part in taken]
    if len({each.targets_n is None for part in found for each in part.values()}) > 1:
        raise TrainingError(
            "the algorithm gave targets_n for some sequences of the step and None for others; for all or for none"
        )
    return found


def settle(prepared: Prepared, estimates: Mapping[int, Estimate]) -> Prepared:
    """The same with what came of each sequence, cut as its decisions lie in micro-batches."""
    known = [
        each.settled([cut(estimates[piece.sequence], piece) for piece in pieces(batch)])
        for each, batch in zip(prepared.known, prepared.batches, strict=False)
    ]
    return attrs.evolve(prepared, known=known)


def cut(estimate: Estimate, piece: Piece) -> Estimate:
    """What came of the decisions of a sequence that lie in one micro-batch."""
    targets_n = estimate.targets_n
    return Estimate(
        advantages_n=piece.of(estimate.advantages_n), targets_n=None if targets_n is None else piece.of(targets_n)
    )


def _taken(algorithm: Algorithm, prepared: Prepared, before: Beforehand) -> dict[int, Taken]:
    """The sequences of a part, by their indices, each whole."""
    parts: dict[int, list[Taken]] = {}
    for index in range(prepared.num_real):
        for piece, each in _pieces_taken(algorithm, prepared, before, index):
            parts.setdefault(piece.sequence, []).append(each)
    return {sequence: _joined(each) for sequence, each in parts.items()}


def _pieces_taken(
    algorithm: Algorithm, prepared: Prepared, before: Beforehand, index: int
) -> list[tuple[Piece, Taken]]:
    """What a micro-batch has of its sequences."""
    batch = prepared.batches[index]
    sizes = list(batch.num_decisions)
    old_N = before.old_logprobs(algorithm, prepared.known[index], index)
    olds = [None] * len(sizes) if old_N is None else torch.split(old_N, sizes)
    frozen = {role: torch.split(each[index].logprobs_N, sizes) for role, each in before.frozen.items()}
    values_N = before.old[index].values_N if before.old else None
    values = [None] * len(sizes) if values_N is None else torch.split(values_N, sizes)
    return [
        (
            piece,
            Taken(
                place=prepared.sequences[piece.sequence].place,
                advantage=prepared.sequences[piece.sequence].advantage,
                logprobs_n=olds[number],
                frozen_n={role: each[number] for role, each in frozen.items()},
                values_n=values[number],
            ),
        )
        for number, piece in enumerate(pieces(batch))
    ]


def _joined(parts: Sequence[Taken]) -> Taken:
    """A sequence from its pieces, which follow each other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return attrs.evolve(
        first,
        logprobs_n=_concatenated([each.logprobs_n for each in parts]),
        frozen_n={role: torch.cat([each.frozen_n[role] for each in parts]) for role in first.frozen_n},
        values_n=_concatenated([each.values_n for each in parts]),
    )


def _concatenated(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [each for each in parts if each is not None]
    return torch.cat(given) if given else None


def _fitting(estimate: Estimate, taken: Taken) -> Estimate:
    known = taken.logprobs_n if taken.logprobs_n is not None else next(iter(taken.frozen_n.values()), taken.values_n)
    for name, given in (("advantages_n", estimate.advantages_n), ("targets_n", estimate.targets_n)):
        if given is not None and known is not None and given.shape != known.shape:
            raise TrainingError(
                f"the algorithm gave {name} of shape {tuple(given.shape)} for a sequence of {len(known)} decisions"
            )
    return estimate
