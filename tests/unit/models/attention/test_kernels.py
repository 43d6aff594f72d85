"""Each kernel against the others, on CPUs: `varlen` by operators of the tests' own, FlexAttention not compiled."""

import contextlib
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cosmos_core.models.attention import kernels, varlen
from cosmos_core.models.attention.documents import Documents, Seen
from cosmos_core.models.attention.kernels import KERNELS, attend, block_mask, kernel_for
from cosmos_core.models.attention.softmax import Block, Scoring, block_backward, block_forward
from tests.unit.models.attention.flash import on_cpus

CPU = torch.device("cpu")
ROWS = [((7,), 0), ((9, 9, 5, 4, 4, 1, 1), 0), ((3, 8, 8), 5), ((1,), 6), ((1, 1, 1), 0)]
"""Documents, and the keys before the first."""
SHAPES = [(4, 2, 8, 8), (4, 4, 24, 16), (6, 1, 6, 5), (2, 2, 8, 11)]
"""Heads, key-value heads, head dim, value dim."""
SINKS = torch.linspace(-1.0, 2.0, 6)


def sizes(lengths, behind, shape):
    heads, kv_heads, dim, value_dim = shape
    units = sum(lengths)
    return (units, heads, dim), (units + behind, kv_heads, dim), (units + behind, kv_heads, value_dim)


def drawn(lengths, behind, shape):
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(size, generator=draw).requires_grad_() for size in sizes(lengths, behind, shape)]
    return rows, Documents(lengths=lengths, num_behind=behind, device=CPU)


def results(rows, documents, scoring):
    """The output, and gradients of its weighted sum."""
    leaves = rows if scoring.sinks_H is None else [*rows, scoring.sinks_H]
    output = attend(tuple(rows), documents, scoring)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def test_varlen_gives_what_the_other_kernels_give():
    for (lengths, behind), shape in itertools.product(ROWS, SHAPES):
        for window, has_sinks in itertools.product([None, 1, 3, 100], [False, True]):
            rows, documents = drawn(lengths, behind, shape)
            sinks = SINKS[: shape[0]].clone().requires_grad_() if has_sinks else None
            scoring = Scoring(scale=0.3, window=window, sinks_H=sinks)
            is_plain = not has_sinks and behind == 0 and (window or 100) >= max(lengths)
            assert kernel_for(rows, documents, scoring).name == ("sdpa" if is_plain else "explicit")
            expected = results(rows, documents, scoring)
            with on_cpus():
                assert kernel_for(rows, documents, scoring).name == "varlen"
                found = results(rows, documents, scoring)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_gives_the_explicit_output(monkeypatch):
    monkeypatch.setattr(kernels, "compiled_flex", lambda: flex_attention)
    for (lengths, behind), shape, window in itertools.product([*ROWS, ((150, 130), 40)], SHAPES[:2], [None, 3]):
        rows, documents = drawn(lengths, behind, shape)
        rows = tuple(row.detach() for row in rows)
        scoring = Scoring(scale=0.3, window=window, cap=0.7)
        found, explicit = (KERNELS[place].attend(rows, documents, scoring) for place in (1, -1))
        torch.testing.assert_close(found, explicit, atol=1e-5, rtol=1e-5)


def test_flex_looks_at_the_blocks_that_hold_what_is_seen():
    for lengths in [(300,), (128, 128), (200, 57, 1, 1, 1), (5,), (127, 1, 129)]:
        for behind, window in itertools.product((0, 1, 100, 300), (None, 1, 50, 129, 1000)):
            documents, units = Documents(lengths=lengths, num_behind=behind, device=CPU), sum(lengths)
            found = block_mask(documents, window)
            whole = create_block_mask(found.mask_mod, None, None, units, units + behind, device="cpu")
            assert torch.equal(found.to_dense() != 0, whole.to_dense() != 0)


def test_the_kernel_is_chosen_by_what_it_takes(monkeypatch):
    monkeypatch.setattr(varlen, "widest", lambda _: 192)
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    sinks = torch.zeros(4)
    for device, dtype, dim, scoring, name in [
        ("cuda", torch.bfloat16, 128, {}, "varlen"),
        ("cuda", torch.float16, 192, {"window": 3, "sinks_H": sinks}, "varlen"),
        ("cuda", torch.bfloat16, 256, {}, "sdpa"),
        ("cuda", torch.float32, 128, {}, "sdpa"),
        ("cuda", torch.float32, 12, {}, "explicit"),
        ("cuda", torch.float64, 128, {}, "explicit"),
        ("cuda", torch.bfloat16, 256, {"cap": 1.0}, "flex"),
        ("cuda", torch.bfloat16, 8, {"cap": 1.0}, "explicit"),
        ("cuda", torch.bfloat16, 128, {"cap": 1.0, "sinks_H": sinks}, "explicit"),
        ("cuda", torch.float32, 128, {"cap": 1.0}, "explicit"),
        ("cuda", torch.float32, 128, {"window": 4}, "explicit"),
        ("cpu", torch.bfloat16, 128, {"window": 5}, "sdpa"),
        ("cpu", torch.bfloat16, 128, {"sinks_H": sinks}, "explicit"),
    ]:
        documents = Documents(lengths=(5,), device=torch.device(device))
        with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
            rows = [torch.empty(5, 2, dim, dtype=dtype, device=device) for _ in range(3)]
            assert kernel_for(rows, documents, Scoring(scale=None, **scoring)).name == name


def test_repeated_heads_attend_as_shared_ones_do():
    rows, documents = drawn((9, 9, 5), 0, (6, 2, 6, 5))
    shared, repeated = (attend(each, documents, Scoring(scale=None)) for each in (rows, kernels.repeated(rows)))
    torch.testing.assert_close(repeated, shared)


def test_operators_of_cuda_know_the_call(monkeypatch):
    """Their shapes and dtypes, forward and backward, by torch's own rules for tensors without storage."""
    monkeypatch.setattr(varlen, "takes", lambda *_: True)
    # Not every build of torch knows CUDA's tensors, even without storage.
    device = torch.device("cpu" if torch.version.cuda is None else "cuda")
    with FakeTensorMode(), torch.no_grad():
        for (lengths, behind), shape, window in itertools.product(ROWS[:3], SHAPES, [None, 3]):
            documents = Documents(lengths=lengths, num_behind=behind, device=device)
            rows = [torch.empty(s, dtype=torch.bfloat16, device=device) for s in sizes(lengths, behind, shape)]
            block = Block(rows=tuple(rows), documents=documents, scoring=Scoring(scale=None, window=window))
            output, lse = block_forward(block)
            assert (output.shape, output.dtype) == ((sum(lengths), shape[0], shape[3]), torch.bfloat16)
            assert (lse.shape, lse.dtype, lse.device) == ((sum(lengths), shape[0]), torch.float32, output.device)
            for grad, row in zip(block_backward(block, output, output, lse), rows, strict=True):
                assert (grad.shape, grad.dtype) == (row.shape, torch.bfloat16)


@pytest.mark.parametrize("reads_tables", [True, False])
def test_the_operator_knows_the_call_over_pages(monkeypatch, reads_tables):
    """That of torch 2.13, and that of releases whose kernel reads no table."""
    assert varlen.reads_tables(), "this release of torch has no block_table: the test of 2.13 says nothing here"
    assert varlen.PAGE % 256 == 0, "FlashAttention 2 takes no other pages"
    monkeypatch.setattr(varlen, "reads_tables", lambda: reads_tables)
    device = torch.device("cpu" if torch.version.cuda is None else "cuda")
    with FakeTensorMode(), torch.no_grad():
        for lengths, window in itertools.product([(1, 1, 1), (1, 7, 30)], [None, 5]):
            query = torch.empty(8, sum(lengths), 64, dtype=torch.bfloat16, device=device).transpose(0, 1)
            cached = tuple(torch.empty(9, varlen.PAGE, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
            numbers = (torch.empty(size, dtype=torch.int32, device=device) for size in (4, 3, (3, 2)))
            pages = varlen.Pages(*numbers, longest=max(lengths))
            output = varlen.from_pages(query, cached, pages, scale=0.1, window=window)
            assert (output.shape, output.dtype, output.device) == (query.shape, torch.bfloat16, query.device)


def test_all_that_is_asked_of_a_row_is_made_once(monkeypatch):
    """The packing has what a layer hands the kernel beside its rows: the same tensors for each layer, and no others."""
    calls = []
    monkeypatch.setattr(varlen, "forward", lambda rows, call, _: calls.append(call) or (rows[0], rows[0][..., 0]))
    rows, documents = drawn((5, 3), 0, (2, 2, 8, 8))
    with on_cpus():
        for _ in range(2):
            kernels.attend(tuple(rows), documents, Scoring(scale=None))
        output, _ = block_forward(Block(rows=tuple(rows), documents=documents, scoring=Scoring(scale=None)))
    assert output.data_ptr() == rows[0].data_ptr(), "a row was copied in which every query sees a key"
    assert calls[0] is calls[1]
    assert {make for make, _ in documents._made} == {Seen.of, varlen.Call.of}
    assert [each.tolist() for each in calls[0].lengths[:2]] == [[0, 5, 8]] * 2
    assert calls[0].lengths[2:4] == (5, 5)
