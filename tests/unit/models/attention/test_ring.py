"""What each process fetches, and slices in float64 against one dense softmax over the whole row."""

import contextlib
import functools
import weakref

import attrs
import torch
import torch.distributed as dist

from cosmos_core.models.attention import softmax
from cosmos_core.models.attention.context import Reach, attend_over_slices
from cosmos_core.models.attention.documents import ContextSlice, Packing
from cosmos_core.models.attention.softmax import Scoring
from cosmos_core.testing.worlds import run_world
from tests.unit.models.attention.flash import on_cpus

CPU = torch.device("cpu")
SIZE, UNITS, HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 64, 8, 4, 6, 5
LENGTHS = {
    "one": [64],
    "cut where slices meet, and elsewhere": [40, 10, 8, 6],
    "each its slice": [16, 16, 16, 16],
    "two a slice": [8] * 8,
    "none ends with a slice": [17, 15, 20, 12],
    "of one unit": [31, 1, 1, 30, 1],
}
SINKS = torch.linspace(-1.0, 2.0, HEADS, dtype=torch.float64)
SCORINGS = {
    "plain": Scoring(scale=0.4),
    "window of itself": Scoring(scale=0.4, window=1),
    "window": Scoring(scale=0.4, window=5),
    "window over slices": Scoring(scale=0.4, window=21),
    "cap": Scoring(scale=0.4, cap=0.7),
    "sinks": Scoring(scale=0.4, sinks_H=SINKS),
    "all of it": Scoring(scale=0.4, window=21, cap=0.7, sinks_H=SINKS),
}


def test_only_keys_that_a_document_reaches_back_to_are_fetched():
    """Counted unit by unit: which of them each process's first document has seen in others' slices."""
    for lengths in LENGTHS.values():
        for window in [None, 1, 5, 21]:
            document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            place_U = torch.arange(UNITS)
            for place in range(SIZE):
                context = ContextSlice(group=None, place=place, size=SIZE, method="ring")
                reach = Reach.of(Packing.of(lengths, CPU, context=context), context, window)
                begins = document[place * 16]
                assert reach.num_head == (document[place * 16 : place * 16 + 16] == begins).sum() * (
                    place > 0 and document[place * 16 - 1] == begins
                )
                seen_U = (document == begins) & (place_U < place * 16)
                if window is not None:
                    seen_U &= place * 16 - place_U < window
                for hop in range(1, SIZE):
                    owner = place - hop
                    seen = 0 if owner < 0 else int(seen_U[owner * 16 : owner * 16 + 16].sum())
                    skipped = reach.skipped(place, hop)
                    assert (0 if skipped is None else 16 - skipped) == seen
                    assert seen == 0 or hop <= reach.num_hops
                    assert seen == 0 or reach.behind(hop) == place * 16 - int(seen_U.nonzero()[0]) - max(
                        owner * 16 - int(seen_U.nonzero()[0]), 0
                    )


def test_documents_with_keys_behind_go_with_their_row():
    packing = Packing.of([10], CPU)
    made = weakref.ref(packing.behind((3,), 5, 8))
    assert packing.behind((3,), 5, 8) is made()
    del packing
    assert made() is None


def row():
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM))
    return [torch.randn(UNITS, *size, dtype=torch.float64, generator=generator) for size in sizes]


def leaves(scoring):
    query, key, value, weight = row()
    sinks = None if scoring.sinks_H is None else scoring.sinks_H.clone()
    tensors = [each.requires_grad_() for each in (query, key, value, sinks) if each is not None]
    return tensors, weight, attrs.evolve(scoring, sinks_H=sinks)


@functools.cache
def dense(lengths, name):
    """One masked softmax over the row: output, and gradients of its weighted sum."""
    tensors, weight, scoring = leaves(SCORINGS[name])
    query, key, value = (each.transpose(0, 1) for each in tensors[:3])
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (key, value))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(UNITS)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    if scoring.window is not None:
        seen &= place[:, None] - place < scoring.window
    scores = query @ key.mT * scoring.scale
    scores = scores if scoring.cap is None else scoring.cap * torch.tanh(scores / scoring.cap)
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    total = total if scoring.sinks_H is None else total + scoring.sinks_H.exp()[:, None, None]
    output = (weights / total @ value).transpose(0, 1)
    return output.detach(), torch.autograd.grad((output * weight).sum(), tensors)


def member(method, piece_scores):
    """For each row and scoring: this slice's output, and gradients summed over the slices.

    No `piece_scores`: by the kernel of CUDA, wherever it takes the scoring.
    """
    softmax.FEWEST_QUERIES = 1
    with on_cpus() if piece_scores is None else contextlib.nullcontext():
        softmax.PIECE_SCORES = {"cpu": piece_scores or 1 << 20}
        return results(method)


def results(method):
    place = dist.get_rank()
    context = ContextSlice(group=dist.group.WORLD, place=place, size=SIZE, method=method)
    own = slice(place * UNITS // SIZE, (place + 1) * UNITS // SIZE)
    found = {}
    for label, lengths in LENGTHS.items():
        for name, asked in SCORINGS.items():
            tensors, weight, scoring = leaves(asked)
            packing = Packing.of(lengths, CPU, context=context)
            output = attend_over_slices([each[own] for each in tensors[:3]], packing, scoring)
            gradients = torch.autograd.grad((output * weight[own]).sum(), tensors)
            for gradient in gradients:
                dist.all_reduce(gradient)
            found[label, name] = output.detach(), gradients
    return found


@functools.cache
def on_slices(method, piece_scores):
    return run_world(SIZE, member, method, piece_scores)


def test_slices_in_float64_give_what_a_dense_softmax_gives(subtests):
    for method, piece_scores in [
        ("ring", 1 << 20),
        ("ring", 200),
        ("gather", 1 << 20),
        ("ulysses", 200),
        ("ring", None),
        ("gather", None),
    ]:
        with subtests.test(method=method, piece_scores=piece_scores):
            for label, lengths in LENGTHS.items():
                for name in SCORINGS:
                    output, gradients = dense(tuple(lengths), name)
                    parts = [each[label, name] for each in on_slices(method, piece_scores)]
                    torch.testing.assert_close(torch.cat([part[0] for part in parts]), output, atol=1e-12, rtol=1e-12)
                    for mine, theirs in zip(parts[0][1], gradients, strict=True):
                        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)
