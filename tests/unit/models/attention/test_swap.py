"""Which halves each process computes, and where that pays. That outputs stay the same, `test_ring` shows."""

import torch

from cosmos_core.models.attention.context import Swap
from cosmos_core.models.attention.documents import ContextSlice, Packing

CPU = torch.device("cpu")


def swaps(lengths, size, window=None):
    contexts = [ContextSlice(group=None, place=place, size=size, method="gather") for place in range(size)]
    packings = [Packing.of(lengths, CPU, context=context) for context in contexts]
    return [(Swap.of(packing, packing.context, window), packing) for packing in packings]


def test_of_one_document_all_processes_compute_the_same():
    for units in [2, 9, 16]:
        for size in [2, 3, 4, 7]:
            found = swaps([size * units], size)
            covered, works = [], []
            for swap, packing in found:
                spans = swap.spans(packing)
                assert sum(span.stop - span.start for span in spans) == units
                covered += [unit for span in spans for unit in range(span.start, span.stop)]
                works.append(sum(unit + 1 for span in spans for unit in range(span.start, span.stop)))
            assert sorted(covered) == list(range(size * units))
            assert max(works) <= (1.0 if units % 2 == 0 else 1.35) * min(works)


def test_what_one_process_sends_another_receives():
    for size in [2, 3, 4, 7]:
        found = [swap for swap, _ in swaps([size * 9], size)]
        for place, swap in enumerate(found):
            assert swap._received == [other._sent[place] for other in found]


def test_queries_travel_where_the_last_slices_cost_most():
    for lengths, window in [([8] * 8, None), ([16] * 4, None), ([64], 4), ([4], None), ([33, 31], 3)]:
        assert all(swap is None for swap, _ in swaps(lengths, 4, window))

    for lengths, window in [([64], None), ([8, 56], None), ([64], 50)]:
        assert all(swap is not None for swap, _ in swaps(lengths, 4, window))
