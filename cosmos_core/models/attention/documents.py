"""The documents of a packed row: which units see one another. A window counts the unit itself.

Shape legend: U units of the row (or of a slice), S keys, B documents.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import attrs
import numpy as np
import torch

from cosmos_core.protocols import Layout
from cosmos_core.protocols.layout import ContextMethod

if TYPE_CHECKING:
    import torch.distributed as dist

Made = TypeVar("Made")


@attrs.frozen(kw_only=True, eq=False)
class Documents:
    """Neighbouring documents, the first of which may have begun before the first unit.

    Attributes:
        lengths: Queries of each.
        device: Where attention is computed.
        num_behind: Units from the first key to the first query.
        num_keys: S; a lone document may have fewer keys than units up to its last query.
    """

    lengths: tuple[int, ...]
    device: torch.device
    num_behind: int = 0
    num_keys: int = attrs.field(
        default=attrs.Factory(lambda self: sum(self.lengths) + self.num_behind, takes_self=True)
    )
    _made: dict[Hashable, Any] = attrs.field(factory=dict, init=False)

    def once(self, make: Callable[[Documents, int | None], Made], window: int | None) -> Made:
        """Make something of the documents and a window, once for all layers."""
        if (make, window) not in self._made:
            self._made[make, window] = make(self, window)
        made: Made = self._made[make, window]
        return made


class Seen(NamedTuple):
    """First and last key that each query sees, int64 [U]; neither ever falls.

    A query that sees none has its first after its last.
    """

    first_U: np.ndarray
    last_U: np.ndarray

    @staticmethod
    def of(documents: Documents, window: int | None) -> Seen:
        """Each unit sees its document up to itself, and no more than the window."""
        ends_B = np.cumsum(documents.lengths) + documents.num_behind
        first_U = np.repeat([0, *ends_B[:-1]], documents.lengths)
        own_U = np.arange(documents.num_behind, ends_B[-1])
        first_U = first_U if window is None else np.maximum(first_U, own_U - window + 1)
        return Seen(first_U, np.minimum(own_U, documents.num_keys - 1))

    @staticmethod
    def there(documents: Documents, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Both on the device, for kernels that compare keys with them."""
        first, last = (torch.from_numpy(each).to(documents.device) for each in documents.once(Seen.of, window))
        return first, last


@attrs.frozen(kw_only=True, eq=False)
class Span:
    """Neighbouring units of a row.

    Attributes:
        start: The first.
        stop: The one after the last.
        num_head: Units of a document that began before.
        begun: The documents that begin in it, cut at its end.
    """

    start: int
    stop: int
    num_head: int
    begun: Documents


@attrs.frozen(kw_only=True, eq=False)
class ContextSlice:
    """The part of a row that this process holds of those that share it: the `place`-th of `size` equal slices."""

    group: dist.ProcessGroup
    place: int
    size: int
    method: ContextMethod

    @staticmethod
    def of(layout: Layout | None) -> ContextSlice | None:
        """This process's place on `cp`; None where rows are whole."""
        if layout is None or layout.mesh.size("cp") == 1:
            return None
        mesh = layout.mesh
        return ContextSlice(group=mesh.group("cp"), place=mesh.place("cp"), size=mesh.size("cp"), method=layout.context)


@attrs.frozen(kw_only=True, eq=False)
class Packing:
    """The documents of one packed row, and the slice of it that this process holds.

    Attributes:
        lengths: Units of each document, in the row's order.
        device: Where attention is computed.
        context: The slice; None where this process holds the row.
    """

    lengths: tuple[int, ...]
    device: torch.device
    context: ContextSlice | None = None
    _spans: dict[tuple[int, int], Span] = attrs.field(factory=dict, init=False)
    _behind: dict[tuple[Any, ...], Documents] = attrs.field(factory=dict, init=False)

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device, context: ContextSlice | None = None) -> Packing:
        """A row of documents of these lengths; where attention is `sdpa`, neighbours of one length share a call."""
        if context is not None:
            assert sum(lengths) % context.size == 0, f"a row of {sum(lengths)} units is cut into {context.size} slices"
        return Packing(lengths=tuple(lengths), device=device, context=context)

    @functools.cached_property
    def documents(self) -> Documents:
        """All documents of the row."""
        return Documents(lengths=self.lengths, device=self.device)

    def span(self, start: int, stop: int) -> Span:
        """Neighbouring units of the row."""
        if (start, stop) not in self._spans:
            ends = [*itertools.accumulate(self.lengths, initial=0)]
            head = min(next(end for end in ends if end >= start), stop) - start
            begun = [min(end, stop) - begin for begin, end in itertools.pairwise(ends) if start <= begin < stop]
            documents = Documents(lengths=tuple(begun), device=self.device)
            self._spans[start, stop] = Span(start=start, stop=stop, num_head=head, begun=documents)
        return self._spans[start, stop]

    @property
    def own(self) -> Span:
        """This process's slice."""
        return self.span(*self.bounds)

    def seen_by(self, span: Span, window: int | None) -> Documents:
        """The documents of a span: the one that began before it first, with what it sees of keys behind."""
        if not span.num_head:
            return span.begun
        behind = span.start - self.first_seen(span.start, window)
        lengths = (span.num_head, *span.begun.lengths)
        return self.behind(lengths, behind, behind + sum(lengths))

    def behind(self, lengths: tuple[int, ...], num_behind: int, num_keys: int) -> Documents:
        """Documents with keys before them, the same for all layers."""
        if (sizes := (lengths, num_behind, num_keys)) not in self._behind:
            made = Documents(lengths=lengths, num_behind=num_behind, num_keys=num_keys, device=self.device)
            self._behind[sizes] = made
        return self._behind[sizes]

    @property
    def num_units(self) -> int:
        """Units of the whole row."""
        return sum(self.lengths)

    @property
    def bounds(self) -> tuple[int, int]:
        """First unit of this process's slice, and the one after its last."""
        if self.context is None:
            return 0, self.num_units
        units = self.num_units // self.context.size
        return self.context.place * units, (self.context.place + 1) * units

    def first_seen(self, unit: int, window: int | None) -> int:
        """First unit that a unit sees, which may look back over `window` units, itself included."""
        return int(self.documents.once(Seen.of, window).first_U[unit])
