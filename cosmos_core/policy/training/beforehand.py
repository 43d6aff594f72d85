"""What is evaluated before a step's first backward: log-probs of old and frozen weights, and what is made of them.

Everything here is under the weights that the step starts from, and computed once for the whole batch.

Shape legend: N decisions of a micro-batch, n of one sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from cosmos_core.errors import TrainingError
from cosmos_core.policy.batches.batch import TrainSequence
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.objective import Known
from cosmos_core.protocols import (
    Against,
    Algorithm,
    Consulting,
    Decided,
    Divergence,
    Estimate,
    Estimating,
    FrozenRole,
    MicroBatch,
    Opinion,
    Taken,
)


@attrs.frozen(kw_only=True, eq=False)
class Prepared:
    """Micro-batches of a step whose decisions were taken at one temperature.

    Attributes:
        batches: As many as every other process of the replica has; those after `num_real` only keep step.
        sequences: What `MicroBatch.sequences` counts.
        known: What is known of the real ones before their forward, on the training device.
        weights: Weights of the decisions of the real ones, on the CPU.
        num_real: Those that count.
        temperature: At which their decisions were taken.
    """

    batches: Sequence[MicroBatch]
    sequences: Sequence[TrainSequence]
    known: Sequence[Known]
    weights: Sequence[torch.Tensor]
    num_real: int
    temperature: float


@attrs.frozen(kw_only=True, eq=False)
class Beforehand:
    """What was evaluated of micro-batches; of each, by its index. Empty on a process without the last stage.

    Attributes:
        old: Under the starting weights; empty where the algorithm needs none of it.
        frozen: Of each frozen model.
        diverges: The role whose divergence the algorithm asks for, and which.
        is_here: Whether this process has the last stage.
    """

    old: Sequence[Decided] = ()
    frozen: Mapping[FrozenRole, Sequence[Decided]] = attrs.field(factory=dict)
    diverges: tuple[FrozenRole, Divergence] | None = None
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

    def against(self) -> list[Against]:
        """What the forward of each micro-batch is compared with."""
        if self.diverges is None:
            return []
        role, divergence = self.diverges
        looks = [each.outlook for each in self.frozen[role]]
        return [Against(outlook=look, question=divergence) for look in looks if look is not None]

    def opinions(self, index: int, decided: Decided) -> dict[FrozenRole, Opinion]:
        """What the frozen models say of a micro-batch, once its forward is known."""
        asked = None if self.diverges is None else self.diverges[0]
        return {
            role: Opinion(
                logprobs_N=each[index].logprobs_N, divergence_N=decided.divergence_N if role == asked else None
            )
            for role, each in self.frozen.items()
        }


def divergence_of(algorithm: Algorithm) -> tuple[FrozenRole, Divergence] | None:
    """The one divergence that an algorithm asks for.

    Raises:
        TrainingError: It asks for several.
    """
    if not isinstance(algorithm, Consulting):
        return None
    asked = [(role, divergence) for role, divergence in algorithm.consults.items() if divergence is not None]
    if len(asked) > 1:
        raise TrainingError(f"the algorithm asks for {len(asked)} divergences, from {[role for role, _ in asked]}; one")
    return asked[0] if asked else None


def settled(
    algorithm: Estimating, parts: Sequence[tuple[Prepared, Beforehand]], world: World, group: GradientGroup
) -> list[list[list[Estimate]]]:
    """What the algorithm makes of each sequence, of each micro-batch, of each part.

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
    taken = [
        [
            list(_taken(algorithm, prepared, before, index))
            for index in range(prepared.num_real if before.is_here else 0)
        ]
        for prepared, before in parts
    ]
    mine = [each for part in taken for some in part for each in some]
    own = [(each.place, [*map(float, algorithm.summarise(each))]) for each in mine]
    replica = [pair for said in world.exchange(json.dumps(own).encode()) for pair in json.loads(said)]
    everyone = [pair for said in group.exchange(json.dumps(replica).encode()) for pair in json.loads(said)]
    batch: dict[int, Sequence[float]] = dict(everyone)
    found = [[[_fitting(algorithm.estimate(each, batch), each) for each in some] for some in part] for part in taken]
    if len({each.targets_n is None for part in found for some in part for each in some}) > 1:
        raise TrainingError(
            "the algorithm gave targets_n for some sequences of the step and None for others; for all or for none"
        )
    return found


def _taken(algorithm: Algorithm, prepared: Prepared, before: Beforehand, index: int) -> Iterator[Taken]:
    """The sequences of a micro-batch."""
    batch = prepared.batches[index]
    sizes = list(batch.num_decisions)
    old_N = before.old_logprobs(algorithm, prepared.known[index], index)
    olds = [None] * len(sizes) if old_N is None else torch.split(old_N, sizes)
    frozen = {role: torch.split(each[index].logprobs_N, sizes) for role, each in before.frozen.items()}
    values_N = before.old[index].values_N if before.old else None
    values = [None] * len(sizes) if values_N is None else torch.split(values_N, sizes)
    for number, sequence in enumerate(batch.sequences):
        yield Taken(
            place=prepared.sequences[sequence].place,
            advantage=prepared.sequences[sequence].advantage,
            logprobs_n=olds[number],
            frozen_n={role: each[number] for role, each in frozen.items()},
            values_n=values[number],
        )


def _fitting(estimate: Estimate, taken: Taken) -> Estimate:
    known = taken.logprobs_n if taken.logprobs_n is not None else next(iter(taken.frozen_n.values()), taken.values_n)
    for name, given in (("advantages_n", estimate.advantages_n), ("targets_n", estimate.targets_n)):
        if given is not None and known is not None and given.shape != known.shape:
            raise TrainingError(
                f"the algorithm gave {name} of shape {tuple(given.shape)} for a sequence of {len(known)} decisions"
            )
    return estimate
