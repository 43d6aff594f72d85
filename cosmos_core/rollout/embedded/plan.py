"""A planned step of the engine: which units are fed to which slots, and which sequences draw from it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from cosmos_core.rollout.embedded.prefix import PrefixGroup
from cosmos_core.rollout.serving.tokens import TokenSequence


@attrs.frozen(kw_only=True)
class Chunk:
    """Consecutive units of one sequence: tokens [first, last) of the step, from unit `start` of slot `slot`."""

    first: int
    last: int
    start: int
    slot: int


@attrs.frozen(kw_only=True)
class Fork:
    """The first `num_units` units of slot `source` are those of `targets` too."""

    source: int
    targets: tuple[int, ...]
    num_units: int


@attrs.frozen(kw_only=True, eq=False)
class Kept:
    """A sequence that has ended, and the keys and values that are kept of it.

    Attributes:
        tokens: All its token ids, int32: what goes on with it begins with them.
        num_units: Units whose keys and values are held: all but the last.
        size: Units of memory that these take.
        held: The keys and values, as the cache keeps them.
        records: What forwards recorded of these units, by name.
        prefix_load: That of the sequence.
    """

    tokens: bytes
    num_units: int
    size: int
    held: Any
    records: Mapping[str, torch.Tensor]
    prefix_load: int


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """One step.

    Attributes:
        sequences: What is in each slot.
        num_decoding: Slots 0 to n - 1 feed their newest unit.
        chunks: What follows them among the step's tokens.
        chunk_tokens: Tokens of the chunks, one after another.
        offsets: What the positions of each chunk's units have on their places.
        forks: Slots that start from what another holds.
        resumed: Slots that start from what is kept of a sequence that has ended.
        num_reused: Units of prompts that slots took over from other requests.
        drawn: The sequences that draw a unit, in slots 0, 1, …
        logit_rows: For each of `drawn` its row among the logits kept; None where row i is that of `drawn[i]`.
        kept: Token of the step whose logits are kept, for each chunk that draws.
        lengths: Units that each slot has after it.
        longest: Units that a slot may come to have, before what is in it ends.
    """

    lengths: list[int]
    longest: int
    num_decoding: int
    chunks: tuple[Chunk, ...] = ()
    forks: tuple[Fork, ...] = ()
    resumed: tuple[tuple[int, Kept], ...] = ()
    num_reused: int = 0
    sequences: list[TokenSequence] = attrs.field(factory=list)
    chunk_tokens: list[int] = attrs.field(factory=list)
    offsets: list[int] = attrs.field(factory=list)
    drawn: list[TokenSequence] = attrs.field(factory=list)
    logit_rows: list[int] | None = None
    kept: list[int] = attrs.field(factory=list)

    @property
    def uses_cache(self) -> bool:
        """True if it needs anything that an earlier step left in the cache."""
        return self.num_decoding > 0 or any(chunk.start for chunk in self.chunks)

    @property
    def shared(self) -> tuple[PrefixGroup, ...]:
        """Decoding slots, next to each other, whose prompts were computed once; the last unit is not always copied."""
        found, first = [], 0
        for _, members in itertools.groupby(self.sequences[: self.num_decoding], lambda each: id(each.origin)):
            run = list(members)
            if len(run) > 1:
                units = run[0].parent.num_prompt - 1
                found.append(PrefixGroup(first=first, last=first + len(run), num_units=units))
            first += len(run)
        return tuple(found)
