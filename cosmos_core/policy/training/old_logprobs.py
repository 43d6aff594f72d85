"""Log-probs of the weights that a step starts from and of frozen models, and the estimates that are made of them.

All of it is computed once for the whole batch, before the step's first backward.

Shape legend: N decisions of a micro-batch, n of one sequence.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence

import attrs
import torch

from cosmos_core.errors import TrainingError
from cosmos_core.policy.batches.batch import turns_of
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.microbatch import Piece, Prepared, pieces
from cosmos_core.protocols import Algorithm, Decided
from cosmos_core.protocols.algorithm import AdvantageEstimator, Estimate, Taken
from cosmos_core.protocols.frozen import Comparison, FrozenOutput, FrozenRole, KLTarget


@attrs.frozen(kw_only=True, eq=False)
class Evaluated:
    """Micro-batches with outputs of other weights for each; without outputs on a process that lacks the last stage.

    Attributes:
        prepared: The micro-batches.
        old: Outputs under the starting weights; empty where the algorithm needs none of it.
        frozen: Outputs of each frozen model.
        compared: The role of the frozen model that the policy is compared with, and how.
        is_here: Whether this process has the last stage.
    """

    prepared: Prepared
    old: Sequence[Decided] = ()
    frozen: Mapping[FrozenRole, Sequence[Decided]] = attrs.field(factory=dict)
    compared: tuple[FrozenRole, Comparison] | None = None
    is_here: bool = True

    def old_logprobs(self, algorithm: Algorithm, index: int) -> torch.Tensor | None:
        """The old log-probs [N] of a micro-batch, as the algorithm wants them."""
        match algorithm.old_logprobs:
            case "none":
                return None
            case "behaviour":
                return self.prepared.known[index].behaviour_logprobs_N
            case "recompute":
                return self.old[index].logprobs_N

    def kl_targets(self) -> list[KLTarget]:
        """The comparison of each micro-batch's forward, if there is one."""
        if self.compared is None:
            return []
        role, comparison = self.compared
        predictions = [each.prediction for each in self.frozen[role]]
        return [KLTarget(prediction=each, comparison=comparison) for each in predictions if each is not None]

    def outputs(self, index: int, decided: Decided) -> dict[FrozenRole, FrozenOutput]:
        """The frozen models' outputs for a micro-batch, once its forward is known."""
        compared = None if self.compared is None else self.compared[0]
        return {
            role: FrozenOutput(
                logprobs_N=each[index].logprobs_N,
                divergence_N=decided.divergence_N if role == compared else None,
                blended=decided.blended if role == compared else None,
            )
            for role, each in self.frozen.items()
        }


def comparison_of(algorithm: Algorithm) -> tuple[FrozenRole, Comparison] | None:
    """The one frozen model that an algorithm compares the policy with, and how.

    Raises:
        TrainingError: There are several.
    """
    asked = [(role, comparison) for role, comparison in algorithm.consults.items() if comparison is not None]
    if len(asked) > 1:
        raise TrainingError(
            f"the algorithm compares the policy with {len(asked)} models: {', '.join(role for role, _ in asked)}; "
            "one is possible"
        )
    return asked[0] if asked else None


def with_estimates(
    algorithm: AdvantageEstimator, parts: Sequence[Evaluated], world: World, group: GradientGroup
) -> tuple[list[Evaluated], list[Estimate]]:
    """The parts with the advantages and targets that the algorithm estimates, and the estimates of their sequences.

    All processes of all replicas of the group call it: they tell each other of their sequences.

    Args:
        algorithm: Its advantages need more than rewards.
        parts: This process's micro-batches.
        world: The processes of this replica.
        group: The replicas.

    Raises:
        GradientGroupError: The group broke.
        TrainingError: What the algorithm gives does not fit its sequence.
    """
    taken = [_taken(algorithm, each) if each.is_here else {} for each in parts]
    own = [(each.place, [*map(float, algorithm.summarise(each))]) for part in taken for each in part.values()]
    replica = [pair for said in world.exchange(json.dumps(own).encode()) for pair in json.loads(said)]
    everyone = [pair for said in group.exchange(json.dumps(replica).encode()) for pair in json.loads(said)]
    if not any(taken):
        return [*parts], []
    # In one order everywhere, so that rounding is the same in every process.
    estimate = algorithm.settle(dict(sorted(everyone, key=operator.itemgetter(0))))
    found = [{sequence: _fitting(estimate(each), each) for sequence, each in part.items()} for part in taken]
    estimates = [each for part in found for each in part.values()]
    if len({each.targets_n is None for each in estimates}) > 1:
        raise TrainingError(
            "the algorithm gave targets_n for some sequences of the step and None for others; for all or for none"
        )
    return [_settled(part, own) if part.is_here else part for part, own in zip(parts, found, strict=True)], estimates


def cut(estimate: Estimate, piece: Piece) -> Estimate:
    """The part of a sequence's estimate whose decisions lie in one micro-batch."""
    targets_n = estimate.targets_n
    return Estimate(
        advantages_n=piece.of(estimate.advantages_n), targets_n=None if targets_n is None else piece.of(targets_n)
    )


def _settled(part: Evaluated, estimates: Mapping[int, Estimate]) -> Evaluated:
    """The same with the estimate of each sequence, cut as its decisions lie in micro-batches."""
    prepared = part.prepared
    known = [
        each.settled([cut(estimates[piece.sequence], piece) for piece in pieces(batch)])
        for each, batch in zip(prepared.known, prepared.batches, strict=False)
    ]
    return attrs.evolve(part, prepared=attrs.evolve(prepared, known=known))


def _taken(algorithm: Algorithm, part: Evaluated) -> dict[int, Taken]:
    """The sequences of a part, by their indices, each whole."""
    pieces_of: dict[int, list[tuple[int, Taken]]] = {}
    for index in range(part.prepared.num_real):
        for piece, each in _pieces_taken(algorithm, part, index):
            pieces_of.setdefault(piece.sequence, []).append((piece.span.first, each))
    # Documents of a sample are packed in any order.
    ordered = {sequence: sorted(each, key=operator.itemgetter(0)) for sequence, each in pieces_of.items()}
    return {sequence: _joined([taken for _, taken in each]) for sequence, each in ordered.items()}


def _pieces_taken(algorithm: Algorithm, part: Evaluated, index: int) -> list[tuple[Piece, Taken]]:
    """The piece of each sequence in a micro-batch, and what was taken of it."""
    prepared, batch = part.prepared, part.prepared.batches[index]
    sizes = list(batch.num_decisions)
    old_N = part.old_logprobs(algorithm, index)
    olds = [None] * len(sizes) if old_N is None else torch.split(old_N, sizes)
    frozen = {role: torch.split(each[index].logprobs_N, sizes) for role, each in part.frozen.items()}
    values_N = part.old[index].values_N if part.old else None
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
                turns=turns_of(prepared.sequences[piece.sequence].payload),
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
