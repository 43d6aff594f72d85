"""From a process's sequences to micro-batches: as many on each process of a replica, with what is known of each.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import attrs
import torch

from cosmos_core.config.schema import PolicyConfig
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.objective import Known, know
from cosmos_core.protocols import Algorithm, MicroBatch, Model


class Packing(TypedDict):
    """How micro-batches are packed (see `Model.pack`)."""

    budget: int
    multiple: int
    is_uniform: bool


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

    @property
    def num_units(self) -> int:
        """Units of those that count."""
        return sum(batch.num_units for batch in self.batches[: self.num_real])

    def weighed(self) -> list[MicroBatch]:
        """All micro-batches, those that count with the weights of their decisions."""
        real = [
            attrs.evolve(batch, weights_N=weights_N)
            for batch, weights_N in zip(self.batches, self.weights, strict=False)
        ]
        return [*real, *self.batches[self.num_real :]]


@attrs.frozen(kw_only=True, eq=False)
class Packer:
    """Packs what the processes of a replica have; all of them call it together.

    Attributes:
        model: Knows how large a sequence is.
        policy: The budget.
        world: The processes of the replica.
        device: Where what is known is needed.
    """

    model: Model
    policy: PolicyConfig
    world: World
    device: torch.device

    @property
    def packing(self) -> Packing:
        """What the model is asked for."""
        mesh = self.world.mesh
        return Packing(
            budget=self.policy.micro_batch_units,
            multiple=mesh.size("cp") * mesh.size("tp"),
            is_uniform=mesh.size("pp") > 1,
        )

    def pack(
        self, share: Share, chosen: Sequence[TrainSequence]
    ) -> tuple[list[MicroBatch], Sequence[TrainSequence], int]:
        """Pack, and bring every process to the same number of micro-batches: they meet in each forward.

        Args:
            share: Of this process; whatever it has can keep step.
            chosen: The sequences of it to pack.

        Returns:
            The micro-batches, the sequences in them, and how many of them, the first, are real.
        """
        sequences = chosen or share.sequences[:1] or tuple(filter(None, [share.filler]))
        batches = self.model.pack([sequence.payload for sequence in sequences], **self.packing)
        num_real = len(batches) if chosen else 0
        number = self.world.most(len(batches))
        if number > len(batches):
            batches += [min(batches, key=lambda batch: batch.num_units)] * (number - len(batches))
        return batches, sequences, num_real

    def prepare(
        self, share: Share, totals: Counts, algorithm: Algorithm, *, temperature: float | None, default: float
    ) -> Prepared:
        """What was drawn at one temperature goes through the model apart from the rest, on every process.

        Args:
            share: Of this process.
            totals: Counts of everything that its loss is an average over.
            algorithm: Weighs it.
            temperature: Of the sequences to prepare, as these say.
            default: What it is where they say nothing.
        """
        drawn = tuple(sequence for sequence in share.sequences if sequence.temperature == temperature)
        batches, packed, num_real = self.pack(share, drawn)
        known = [know(algorithm, batch, drawn, totals) for batch in batches[:num_real]]
        return Prepared(
            batches=batches,
            sequences=packed,
            known=[each.on(self.device) for each in known],
            weights=[each.weights_N for each in known],
            num_real=num_real,
            temperature=default if temperature is None else temperature,
        )
