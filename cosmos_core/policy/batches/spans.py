"""Sequences that lie in several micro-batches: which decisions of each a micro-batch has.

Shape legend: N decisions of a micro-batch, n of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import attrs
import torch

from cosmos_core.protocols import MicroBatch, Span

Whole = TypeVar("Whole", torch.Tensor, range)


@attrs.frozen(kw_only=True)
class Piece:
    """Decisions of one sequence in one micro-batch.

    Attributes:
        sequence: Index of the sequence, among what was packed.
        number: How many decisions.
        span: Which of the sequence's.
    """

    sequence: int
    number: int
    span: Span

    def of(self, whole_n: Whole) -> Whole:
        """Its part of what there is for each decision of the sequence."""
        return whole_n[self.span.first : self.span.first + self.number]


def pieces(batch: MicroBatch) -> Iterator[Piece]:
    """What a micro-batch has of each sequence in it, in its order."""
    spans = batch.spans or tuple(Span(first=0, total=number) for number in batch.num_decisions)
    for sequence, number, span in zip(batch.sequences, batch.num_decisions, spans, strict=True):
        yield Piece(sequence=sequence, number=number, span=span)
