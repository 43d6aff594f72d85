"""The prefix cache: what the KV cache held of sequences that ended, for the next turn of their dialogue.

A turn is a request whose prompt is all that came before. Where it begins with every token of a sequence that is kept,
it goes on in that one's keys and values, which are its own from then on, and only what is new is processed.
"""

from __future__ import annotations

import array
from collections import deque

from cosmos_core.protocols import FinishReason
from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.paged import PagedCache
from cosmos_core.rollout.embedded.plan import Kept
from cosmos_core.rollout.serving.tokens import TokenSequence


class PrefixCache:
    """Keeps sequences that ended, by their tokens; the oldest give way.

    All of them together take at most `share` of what the cache has for sequences in flight, all at the longest that
    any was asked to become; the cache itself may take back what they have before (`evict`).

    Attributes:
        evicted_units: Units that gave way so far, to others or to what runs.
    """

    def __init__(self, cache: SlotCache | PagedCache, *, num_slots: int, share: float) -> None:
        self._cache = cache
        self._slots = num_slots * share
        self._kept = deque[Kept]()
        self._longest = 0
        self._size = 0
        self.evicted_units = 0
        if isinstance(cache, PagedCache):
            cache.evict = self.evict

    def keep(self, sequence: TokenSequence) -> None:
        """Keep a sequence that has just ended and is still in its slot, if there is room for it.

        Not one that was aborted, and none with a prompt that shows images: their tokens do not say what entered.
        """
        if sequence.reason is FinishReason.ABORTED or sequence.parent.conditioning is not None or not self._slots:
            return
        self._longest = max(self._longest, self._cache.size_of(sequence.parent.longest))
        # The last unit was drawn, and never fed.
        num_units = len(sequence.tokens) - 1
        size, most = self._cache.size_of(num_units), self._slots * self._longest
        if size > most:
            return
        while self._size + size > most:
            self.evict()
        self._size += size
        held = self._cache.keep(sequence.slot, num_units)
        self._kept.append(
            Kept(
                tokens=_ids(sequence),
                num_units=num_units,
                size=size,
                held=held,
                records=sequence.records,
                prefix_load=sequence.prefix_load,
            )
        )

    def find(self, sequence: TokenSequence) -> Kept | None:
        """The longest one that a sequence begins with."""
        if not self._kept or sequence.parent.conditioning is not None:
            return None
        ids = _ids(sequence)
        return max(
            filter(lambda kept: ids.startswith(kept.tokens), self._kept), key=lambda k: k.num_units, default=None
        )

    def take(self, kept: Kept) -> None:
        """Take it out, for a sequence that goes on with it."""
        self._kept.remove(kept)
        self._size -= kept.size

    def evict(self) -> bool:
        """Let the oldest one go; False if there is none."""
        if not self._kept:
            return False
        kept = self._kept.popleft()
        self._size -= kept.size
        self.evicted_units += kept.num_units
        self._cache.drop(kept.held)
        return True

    def clear(self) -> None:
        """Keep nothing: what is loaded would not compute it again, or its memory is given up."""
        while self._kept:
            self._cache.drop(self._kept.popleft().held)
        self._size = 0


def _ids(sequence: TokenSequence) -> bytes:
    return array.array("i", sequence.tokens).tobytes()
