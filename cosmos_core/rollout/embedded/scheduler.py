"""Assigns sequences to slots and plans each step.

Slots 0 to n - 1 are always taken without a gap. All of them decode, except that the last one may hold a prompt that
was too long for one step's budget; nothing else is admitted until it is done.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Final

import attrs

from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.paged import PagedCache
from cosmos_core.rollout.embedded.plan import Chunk, Fork, Kept, Plan
from cosmos_core.rollout.embedded.prefix_cache import PrefixCache
from cosmos_core.rollout.embedded.sampler import SamplingFeatures, SlotNumbers
from cosmos_core.rollout.serving.requests import WaitingQueue, place_of
from cosmos_core.rollout.serving.tokens import TokenRequestState, TokenSequence

_LEAST_SHARED: Final = 32
"""Units of a beginning that prompts of two requests must have in common to share it: fewer are processed as fast."""


@attrs.frozen(kw_only=True, eq=False)
class _Beginning:
    """The first units of a sequence that are in the cache: in the slot of `source`, or in what is `kept`."""

    num_units: int = 0
    source: TokenSequence | None = None
    kept: Kept | None = None


class Scheduler:
    """Admits waiting sequences in order of priority, then of arrival, while slots and the cache have room for them.

    If the cache runs out of room, the last of them wait again.

    Attributes:
        version: Weight version of what is generated.
        num_preempted: Sequences that were set back for room so far, each time.
    """

    def __init__(
        self,
        cache: SlotCache | PagedCache,
        numbers: SlotNumbers,
        prefixes: PrefixCache,
        *,
        num_slots: int,
        prefill_units: int,
        shares_beginnings: bool = False,
    ) -> None:
        self._cache = cache
        self._prefixes = prefixes
        self._numbers = numbers
        self._num_slots = num_slots
        self._prefill_units = prefill_units
        self._shares_beginnings = shares_beginnings
        self._waiting: WaitingQueue[TokenSequence] = WaitingQueue()
        self._running: list[TokenSequence] = []
        self._partial: TokenSequence | None = None
        self._features: SamplingFeatures | None = None
        self._loads = 0
        self.version = 0
        self.num_preempted = 0

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not started, or set back."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return bool(self._running or self._waiting)

    @property
    def features(self) -> SamplingFeatures:
        """The features that the sampler needs now."""
        if self._features is None:
            samplings = {sequence.parent.request.sampling for sequence in self._running}
            self._features = functools.reduce(operator.or_, map(SamplingFeatures.of, samplings), SamplingFeatures.NONE)
        return self._features

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        """Let sequences wait."""
        self._waiting.add(sequences)

    def mark(self, version: int) -> None:
        """Attribute what is generated from now on to `version`."""
        self.version = version
        # The same version may be loaded twice, with other weights.
        self._loads += 1
        for sequence in self._running:
            sequence.mark(version)
        if self._partial is not None:
            # It draws nothing before it is whole, and samples that start later share it: no prompt is of two versions.
            self._set_back(self._partial)

    def requeue(self) -> None:
        """Set every running sequence back to waiting: its cache is to be computed anew, its units stay.

        Nothing is kept of those that ended.
        """
        self._prefixes.clear()
        running, self._running, self._partial, self._features = self._running, [], None, None
        self._cache.release(0)
        for sequence in running:
            sequence.slot, sequence.cached = -1, 0
        self.add(running)

    def _set_back(self, sequence: TokenSequence) -> None:
        """The same for one."""
        self._compact({sequence.slot})
        sequence.slot, sequence.cached = -1, 0
        self.add([sequence])

    def remove(self, finished: Iterable[TokenSequence]) -> None:
        """Take sequences out, running or waiting, keep what they may be continued with, and close the gaps."""
        gone = set(finished)
        for sequence in gone:
            if sequence.slot >= 0:
                self._prefixes.keep(sequence)
        if any(sequence.slot < 0 for sequence in gone):
            self._waiting.remove(gone)
        if any(sequence.slot >= 0 for sequence in gone):
            self._compact({sequence.slot for sequence in gone if sequence.slot >= 0})
        for sequence in gone:
            sequence.slot = -1

    def _compact(self, gone: set[int]) -> None:
        self._features = None
        if self._partial is not None and self._partial.slot in gone:
            self._partial = None
        # The unfinished prompt must stay last, so it moves after the others have closed up.
        decoding = len(self._running) - (self._partial is not None)
        kept = decoding - sum(slot < decoding for slot in gone)
        holes = sorted(slot for slot in gone if slot < kept)
        self._move([slot for slot in range(kept, decoding) if slot not in gone], holes)
        if self._partial is not None and kept < decoding:
            self._move([decoding], [kept])
        del self._running[kept + (self._partial is not None) :]
        self._cache.release(len(self._running))

    def _move(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        moved = [self._running[source] for source in sources]
        self._cache.move(sources, targets, max(len(s.tokens) for s in moved))
        self._numbers.move(sources, targets)
        for sequence, target in zip(moved, targets, strict=True):
            self._running[target] = sequence
            sequence.slot = target

    def plan(self) -> Plan:
        """Decide the next step and place what is admitted."""
        while self._cache.room(len(sequence.tokens) for sequence in self._running) < 0:
            self._set_back(max(self._running, key=place_of))
            self.num_preempted += 1
        draft = _Draft(self._prefill_units, self._prefixes, self._loads, may_decode=self._partial is None)
        num_decoding = len(self._running)
        if self._partial is not None:
            num_decoding -= 1
            self._partial = draft.go_on(self._partial)
        free = self._num_slots - len(self._running)
        # With half a page more for each, what is admitted is not set back at once.
        room = self._cache.room(map(self._ahead, self._running)) if self._waiting else 0
        while self._waiting and free and room > 0 and self._partial is None:
            sequence = self._waiting.first()
            beginning = self._beginning(draft, sequence)
            shared = 0 if beginning.source is None else beginning.num_units
            room -= self._cache.size_of(self._ahead(sequence)) - (shared - shared % self._cache.page)
            if room < 0 or not draft.has_room(sequence, beginning):
                break
            self._waiting.take()
            free -= 1
            self._partial = draft.admit(sequence, beginning)
        self._place([*draft.late, *draft.in_order()])
        return self._finish(draft, num_decoding + len(draft.late))

    def _ahead(self, sequence: TokenSequence) -> int:
        """Units that a sequence will have half a page later, at most."""
        return min(len(sequence.tokens) + self._cache.page // 2, sequence.parent.longest)

    def _beginning(self, draft: _Draft, sequence: TokenSequence) -> _Beginning:
        """The most of a waiting sequence that is in the cache, or will be after this step's chunks."""
        parent = sequence.parent
        source = draft.leaders.get(parent) or next(filter(self._is_holder, parent.samples), None)
        if source is None:
            kept = self._prefixes.find(sequence)
            if kept is not None:
                return _Beginning(num_units=kept.num_units, kept=kept)
            source = self._alike(draft, parent)
        if source is None:
            return _Beginning()
        common = parent.common(source.parent)
        # All of a prompt only with that prompt's logits at hand.
        has_logits = draft.leads(source) and not source.num_generated and common == source.parent.num_prompt
        return _Beginning(num_units=min(common, len(sequence.tokens) - (not has_logits)), source=source)

    def _is_holder(self, sequence: TokenSequence) -> bool:
        """True if the beginning of its prompt was cached under the loaded weights, whole and in an earlier step."""
        return sequence.slot >= 0 and sequence.prefix_load == self._loads

    def _alike(self, draft: _Draft, parent: TokenRequestState) -> TokenSequence | None:
        """A sample of another request that has the most in common with a prompt, if that is worth it."""
        if not self._shares_beginnings or parent.conditioning is not None:
            return None
        there = {each.parent: each for each in filter(self._is_holder, self._running)}
        there |= {other: leader for other, leader in draft.leaders.items() if leader.prefix_load == self._loads}
        found = max((each for each in there if each.conditioning is None), key=parent.common, default=None)
        return None if found is None or parent.common(found) < _LEAST_SHARED else there[found]

    def _place(self, sequences: list[TokenSequence]) -> None:
        new = [sequence for sequence in sequences if sequence.slot < 0]
        if not new:
            return
        first = len(self._running)
        self._running.extend(new)
        self._features = None
        for slot, sequence in enumerate(new, first):
            sequence.slot = slot
            sequence.mark(self.version)
        self._numbers.place(first, new)

    def _finish(self, draft: _Draft, num_decoding: int) -> Plan:
        chunks: list[Chunk] = []
        tokens: list[int] = []
        kept: list[int] = []
        rows = list(range(num_decoding))
        at = num_decoding
        for sequence, start, stop in draft.chunks:
            chunks.append(Chunk(first=at, last=at + stop - start, start=start, slot=sequence.slot))
            tokens.extend(sequence.tokens[start:stop])
            at += stop - start
            if sequence is not self._partial:
                rows.extend([num_decoding + len(kept)] * (1 + len(draft.shares.get(sequence, ()))))
                kept.append(at - 1)
        drawn = self._running if self._partial is None else self._running[:-1]
        return Plan(
            sequences=self._running.copy(),
            num_decoding=num_decoding,
            chunks=tuple(chunks),
            chunk_tokens=tokens,
            offsets=[sequence.parent.offset for sequence, _, _ in draft.chunks],
            forks=draft.forks(),
            resumed=tuple((sequence.slot, kept) for sequence, kept in draft.resumed),
            num_reused=draft.num_reused,
            drawn=drawn.copy(),
            logit_rows=rows if draft.shares else None,
            kept=kept,
            lengths=[len(sequence.tokens) for sequence in self._running],
            longest=max(sequence.parent.longest for sequence in self._running),
        )


class _Draft:
    """A plan in the making.

    Attributes:
        chunks: (sequence, first unit to feed, end), in the order of their slots.
        shares: Samples that draw from the logits of another's prompt.
        late: Samples that only lack the last unit of their prompt, so they decode at once.
        resumed: Sequences that go on with one that has ended, and what is kept of it.
        num_reused: Units of prompts that sequences take over from other requests.
        leaders: For each request the sample whose prompt this step completes.
    """

    def __init__(self, budget: int, prefixes: PrefixCache, loads: int, *, may_decode: bool) -> None:
        self.chunks: list[tuple[TokenSequence, int, int]] = []
        self.shares: dict[TokenSequence, list[TokenSequence]] = {}
        self.late: list[TokenSequence] = []
        self.resumed: list[tuple[TokenSequence, Kept]] = []
        self.num_reused = 0
        self.leaders: dict[TokenRequestState, TokenSequence] = {}
        self._budget = budget
        self._prefixes = prefixes
        self._loads = loads
        self._may_decode = may_decode
        self._forks: dict[tuple[TokenSequence, int], list[TokenSequence]] = {}

    def has_room(self, sequence: TokenSequence, beginning: _Beginning) -> bool:
        """True if the budget allows to admit a sequence, in part at least."""
        return self._budget > 0 or len(sequence.tokens) - beginning.num_units <= 1

    def leads(self, source: TokenSequence) -> bool:
        """True if this step completes the prompt of a sample: its logits are at hand."""
        return self.leaders.get(source.parent) is source

    def go_on(self, sequence: TokenSequence) -> TokenSequence | None:
        """Continue a prompt; returns it if it is still not done."""
        return self._feed(sequence)

    def admit(self, sequence: TokenSequence, beginning: _Beginning) -> TokenSequence | None:
        """Take a sequence in; returns it if its prompt is not done in this step."""
        source, kept, size = beginning.source, beginning.kept, len(sequence.tokens)
        sequence.cached, sequence.origin, sequence.prefix_load = beginning.num_units, sequence, self._loads
        if kept is not None:
            self._prefixes.take(kept)
            self.resumed.append((sequence, kept))
            sequence.prefix_load = kept.prefix_load
        if source is not None:
            self._forks.setdefault((source, sequence.cached), []).append(sequence)
            sequence.prefix_load = source.prefix_load
            if source.parent.num_prompt == sequence.parent.num_prompt <= sequence.cached + 1:
                sequence.origin = source.origin
        if source is None or source.parent is not sequence.parent:
            self.num_reused += sequence.cached
        if source is not None and self.leads(source) and sequence.cached == size:
            self.shares.setdefault(source, []).append(sequence)
        elif source is not None and not self.leads(source) and sequence.cached == size - 1 and self._may_decode:
            self.late.append(sequence)
        else:
            return self._feed(sequence)
        return None

    def _feed(self, sequence: TokenSequence) -> TokenSequence | None:
        size = len(sequence.tokens)
        # A last unit is fed whatever the budget, so that a step with forks alone cannot starve.
        stop = min(size, sequence.cached + max(1, self._budget))
        self.chunks.append((sequence, sequence.cached, stop))
        self._budget -= stop - sequence.cached
        sequence.cached = stop
        if stop < size:
            return sequence
        self.leaders.setdefault(sequence.parent, sequence)
        return None

    def in_order(self) -> Iterable[TokenSequence]:
        """Sequences of the chunks, each followed by those that share its logits."""
        for sequence, _, _ in self.chunks:
            yield sequence
            yield from self.shares.get(sequence, ())

    def forks(self) -> tuple[Fork, ...]:
        """Forks, once every sequence has its slot."""
        return tuple(
            Fork(source=source.slot, targets=tuple(target.slot for target in targets), num_units=size)
            for (source, size), targets in self._forks.items()
            if size
        )
