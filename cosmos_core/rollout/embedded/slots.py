"""Per-slot numbers that every step needs on the device, one row a slot, moved with their sequence."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Rows

import torch

from cosmos_core.protocols import Sampling
from cosmos_core.rollout.embedded.sampler import Drawing
from cosmos_core.rollout.serving.sequence import Sequence

_TOKEN, _PLACE, _POSITION, _UNIT, _KEY, _TOP_K, _GREEDY = range(7)
_TEMPERATURE, _TOP_P = range(2)


class Traits(enum.Flag):
    """What some sequence in flight needs of the sampler beyond plain draws at temperature 1."""

    NONE = 0
    GREEDY = enum.auto()
    SCALED = enum.auto()
    RESTRICTED = enum.auto()

    @classmethod
    def of(cls, sampling: Sampling) -> Traits:
        """What one request needs."""
        traits = cls.GREEDY if sampling.temperature == 0 else cls.NONE
        if sampling.temperature not in (0, 1):
            traits |= cls.SCALED
        if sampling.top_k > 0 or sampling.top_p < 1:
            traits |= cls.RESTRICTED
        return traits


class SlotNumbers:
    """Newest token, its place in the sequence and its position, next unit and random key, sampling of each slot.

    A position is what the model rotates by: behind a prompt that shows images it is not the place in the sequence.
    """

    def __init__(self, num_slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._ints = torch.zeros(num_slots, 7, dtype=torch.int64, device=device)
        self._floats = torch.ones(num_slots, 2, dtype=torch.float32, device=device)
        self.places = torch.arange(num_slots, device=device)

    def place(self, first: int, sequences: Rows[Sequence]) -> None:
        """Fill slots `first`, …: each will feed its last unit, then draw the next."""
        ints, floats = [], []
        for sequence in sequences:
            sampling = sequence.flight.request.sampling
            top_k = sampling.top_k or self._vocabulary
            is_greedy = int(sampling.temperature == 0)
            place = len(sequence.tokens) - 1
            position = place + sequence.flight.offset
            ints.append((sequence.tokens[-1], place, position, sequence.num_generated, sequence.key, top_k, is_greedy))
            floats.append((sampling.temperature or 1.0, sampling.top_p))
        last = first + len(sequences)
        self._ints[first:last] = torch.tensor(ints, dtype=torch.int64)
        self._floats[first:last] = torch.tensor(floats, dtype=torch.float32)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy some slots to others."""
        self._ints[targets] = self._ints[sources]
        self._floats[targets] = self._floats[sources]

    def feed(self, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Newest token, its place and its position, of the first `num` slots, int64 [num] each."""
        return self._ints[:num, _TOKEN], self._ints[:num, _PLACE], self._ints[:num, _POSITION]

    def drawing(self, num: int, traits: Traits) -> Drawing:
        """How to draw the next unit of the first `num` slots."""
        ints, floats = self._ints[:num], self._floats[:num]
        return Drawing(
            keys_R=ints[:, _KEY],
            units_R=ints[:, _UNIT],
            temperature_R=floats[:, _TEMPERATURE] if Traits.SCALED in traits else None,
            greedy_R=ints[:, _GREEDY].bool() if Traits.GREEDY in traits else None,
            top_k_R=ints[:, _TOP_K] if Traits.RESTRICTED in traits else None,
            top_p_R=floats[:, _TOP_P] if Traits.RESTRICTED in traits else None,
        )

    def advance(self, tokens_R: torch.Tensor) -> None:
        """Take in what the first R slots drew."""
        rows = self._ints[: tokens_R.shape[0]]
        rows[:, _TOKEN] = tokens_R
        rows[:, _PLACE : _UNIT + 1] += 1
