"""Assigns sequences to slots and plans each step.

Slots 0 to n - 1 are always taken without a gap. All of them decode, except that the last one may hold a prompt that
was too long for one step's budget; nothing else is admitted until it is done.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.paged import PagedCache
from cosmos_core.rollout.embedded.plan import Chunk, Fork, Kept, Plan
from cosmos_core.rollout.embedded.prefix_cache import PrefixCache
from cosmos_core.rollout.embedded.sampler import SamplingFeatures, SlotNumbers
from cosmos_core.rollout.serving.requests import WaitingQueue
from cosmos_core.rollout.serving.tokens import TokenRequestState, TokenSequence


class Scheduler:
    """Admits waiting sequences in order of priority, then of arrival."""

    def __init__(
        self,
        cache: SlotCache | PagedCache,
        numbers: SlotNumbers,
        prefixes: PrefixCache,
        *,
        num_slots: int,
        prefill_units: int,
    ) -> None:
        self._cache = cache
        self._prefixes = prefixes
        self._numbers = numbers
        self._num_slots = num_slots
        self._prefill_units = prefill_units
        self._waiting: WaitingQueue[TokenSequence] = WaitingQueue()
        self._running: list[TokenSequence] = []
        self._partial: TokenSequence | None = None
        self._features: SamplingFeatures | None = None
        self.version = 0

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
        for sequence in self._running:
            sequence.mark(version)
            # The same version may be loaded twice, with other weights.
            sequence.prefix_version = -1
        if self._partial is not None:
            # It draws nothing before it is whole, and samples that start later share it: no prompt is of two versions.
            partial = self._partial
            partial.cached, partial.prefix_version, partial.origin = 0, version, partial

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
        draft = _Draft(self._prefill_units, self._prefixes, may_decode=self._partial is None)
        num_decoding = len(self._running)
        if self._partial is not None:
            num_decoding -= 1
            self._partial = draft.go_on(self._partial)
        free = self._num_slots - len(self._running)
        while self._waiting and free and self._partial is None:
            sequence = self._waiting.first()
            if not draft.has_room(sequence, self._holder(sequence.parent)):
                break
            self._waiting.take()
            free -= 1
            self._partial = draft.admit(sequence, self._holder(sequence.parent))
        self._place([*draft.late, *draft.in_order()])
        return self._finish(draft, num_decoding + len(draft.late))

    def _holder(self, parent: TokenRequestState) -> TokenSequence | None:
        """A decoding sample of the request whose prompt was cached under the loaded weights."""
        return next(
            (s for s in parent.samples if s.slot >= 0 and s.prefix_version == self.version and s is not self._partial),
            None,
        )

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
            sequence.prefix_version = self.version
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
    """

    def __init__(self, budget: int, prefixes: PrefixCache, *, may_decode: bool) -> None:
        self.chunks: list[tuple[TokenSequence, int, int]] = []
        self.shares: dict[TokenSequence, list[TokenSequence]] = {}
        self.late: list[TokenSequence] = []
        self.resumed: list[tuple[TokenSequence, Kept]] = []
        self._budget = budget
        self._prefixes = prefixes
        self._may_decode = may_decode
        self._leaders: dict[TokenRequestState, TokenSequence] = {}
        self._forks: dict[tuple[TokenSequence, int], list[TokenSequence]] = {}

    def has_room(self, sequence: TokenSequence, holder: TokenSequence | None) -> bool:
        """True if the budget allows to admit a sequence, in part at least."""
        return self._budget > 0 or len(sequence.tokens) - self._shared_units(sequence, holder) <= 1

    def go_on(self, sequence: TokenSequence) -> TokenSequence | None:
        """Continue a prompt; returns it if it is still not done."""
        return self._feed(sequence)

    def admit(self, sequence: TokenSequence, holder: TokenSequence | None) -> TokenSequence | None:
        """Take a sequence in; returns it if its prompt is not done in this step.

        The holder is a sample of its request that has the prompt in the cache since an earlier step.
        """
        size = len(sequence.tokens)
        leader = self._leaders.get(sequence.parent)
        sequence.cached = self._shared_units(sequence, holder)
        source = leader or holder
        sequence.origin = sequence if source is None else source.origin
        if source is not None:
            self._forks.setdefault((source, sequence.cached), []).append(sequence)
        elif (kept := self._prefixes.take(sequence)) is not None:
            sequence.cached = kept.num_units
            self.resumed.append((sequence, kept))
        if leader is not None and sequence.cached == size:
            self.shares.setdefault(leader, []).append(sequence)
        elif leader is None and holder is not None and sequence.cached == size - 1 and self._may_decode:
            self.late.append(sequence)
        else:
            return self._feed(sequence)
        return None

    def _shared_units(self, sequence: TokenSequence, holder: TokenSequence | None) -> int:
        """Units that it takes over from another sample; all of a prompt only with that prompt's logits at hand."""
        leader = self._leaders.get(sequence.parent)
        if leader is None and holder is None:
            return 0
        has_logits = leader is not None and leader.num_generated == 0
        return min(sequence.parent.num_prompt, len(sequence.tokens) - (not has_logits))

    def _feed(self, sequence: TokenSequence) -> TokenSequence | None:
        size = len(sequence.tokens)
        # A last unit is fed whatever the budget, so that a step with forks alone cannot starve.
        stop = min(size, sequence.cached + max(1, self._budget))
        self.chunks.append((sequence, sequence.cached, stop))
        self._budget -= stop - sequence.cached
        sequence.cached = stop
        if stop < size:
            return sequence
        self._leaders.setdefault(sequence.parent, sequence)
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
