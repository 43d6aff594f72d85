"""Even work where later slices are dearer: processes compute the attention of one another's queries.

Each slice is two halves. Of the 2P halves of a row the process `i` computes the `i`-th and the `i`-th from the end,
so that near and far ones come together, if that pays: queries travel there and outputs back. What a process holds of
the row stays the slice that it has, so that nothing but attention knows.

Source: the order of Llama 3 (arXiv:2407.21783), section 3.3.2. Deviation: there the row itself is dealt out so.

Shape legend: U units of a slice, H heads, D head dim, P processes that share the row.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch

from cosmos_core.models.attention.documents import ContextSlice, Packing, Span
from cosmos_core.models.parallel.collectives import all_to_all

WORTH: Final = 1.1
"""How much more the dearest slice has to cost than the dearest pair of halves for queries to travel."""


@attrs.frozen(kw_only=True, eq=False)
class Swap:
    """Which halves each process computes.

    Attributes:
        context: This process's slice.
        sizes: Units of the first and of the second half of each slice.
    """

    context: ContextSlice
    sizes: tuple[int, int]

    @staticmethod
    def of(packing: Packing, context: ContextSlice, window: int | None) -> Swap | None:
        """The halves, where that evens out the work of the processes; None where slices are even enough."""
        units = packing.num_units // context.size
        if units < 2:
            return None
        swap = Swap(context=context, sizes=(units - units // 2, units // 2))
        halves = [int(part.sum()) for part in torch.split(packing.num_seen(window), [*swap.sizes] * context.size)]
        slices = [sum(halves[2 * place : 2 * place + 2]) for place in range(context.size)]
        pairs = [sum(halves[half] for half in swap.computed(place)) for place in range(context.size)]
        return swap if max(slices) > WORTH * max(pairs) else None

    def computed(self, place: int) -> tuple[int, int]:
        """The halves that a process computes."""
        return place, 2 * self.context.size - 1 - place

    def spans(self, packing: Packing) -> tuple[Span, Span]:
        """The units that this process computes."""
        first, second = (self._span(packing, half) for half in self.computed(self.context.place))
        return first, second

    def there(self, query_UHD: torch.Tensor) -> torch.Tensor:
        """Queries of this process's halves from those of its slice."""
        held, sent = self._sent()
        parts = torch.split(query_UHD, list(self.sizes))
        ordered = torch.cat([parts[half - 2 * self.context.place] for half in held])
        return all_to_all(ordered, self.context.group, receive=self._received(), send=sent)

    def back(self, output_UHD: torch.Tensor) -> torch.Tensor:
        """The output of this process's slice from those of its halves."""
        held, sent = self._sent()
        ordered = all_to_all(output_UHD, self.context.group, receive=sent, send=self._received())
        parts = dict(zip(held, torch.split(ordered, [self.sizes[half % 2] for half in held]), strict=True))
        return torch.cat([parts[half] for half in sorted(held)])

    def _computes(self, half: int) -> int:
        return min(half, 2 * self.context.size - 1 - half)

    def _sent(self) -> tuple[list[int], list[int]]:
        """The halves that this process holds, in the order of those that compute them, and how many units each gets."""
        first = 2 * self.context.place
        held = sorted((first, first + 1), key=self._computes)
        return held, self._counts({half: self._computes(half) for half in held})

    def _received(self) -> list[int]:
        """How many units of this process's halves each process holds: the nearer half comes from an earlier one."""
        return self._counts({half: half // 2 for half in self.computed(self.context.place)})

    def _counts(self, places: dict[int, int]) -> list[int]:
        counts = [0] * self.context.size
        for half, place in places.items():
            counts[place] += self.sizes[half % 2]
        return counts

    def _span(self, packing: Packing, half: int) -> Span:
        start = half // 2 * sum(self.sizes) + half % 2 * self.sizes[0]
        return packing.span(start, start + self.sizes[half % 2])
