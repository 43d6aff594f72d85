"""Every kernel of attention that the device has, in 16 bits against one dense softmax in float64."""

from __future__ import annotations

import pytest
import torch

from cosmos_core.models.attention.documents import Documents
from cosmos_core.models.attention.kernels import KERNELS, attend
from cosmos_core.models.attention.softmax import Block, Merged, Scoring, block_backward, block_forward, sinks_backward

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler warns of what a device could do, and of what it looks at itself.
    pytest.mark.filterwarnings("default::UserWarning"),
    # FlexAttention is compiled for every shape of heads.
    pytest.mark.timeout(300),
]

RAGGED = (161, 160, 128, 127, 64, 7, 1, 1)
ROWS = {
    "ragged": (RAGGED, 0),
    "one": ((320,), 0),
    "single units": ((1,) * 40, 0),
    "keys behind": ((97, 130, 5), 200),
    "one unit behind many": ((1,), 300),
}
SHAPES = {
    "shared heads": (8, 2, 64, 64),
    "each its own": (4, 4, 128, 128),
    "latent": (4, 4, 192, 128),
    "wide": (4, 1, 256, 256),
    "odd": (4, 2, 72, 40),
}
"""Heads, key-value heads, head dim, value dim."""
SINKS = torch.linspace(-1.0, 3.0, 8)
SCORINGS = {
    "plain": {},
    "window": {"window": 100},
    "window of itself": {"window": 1},
    "sinks": {"sinks_H": SINKS},
    "sinks and a window": {"sinks_H": SINKS, "window": 33},
    "soft cap": {"cap": 2.0},
    "soft cap and a window": {"cap": 2.0, "window": 100},
    "all of it": {"cap": 2.0, "window": 100, "sinks_H": SINKS},
}
FEW = ("plain", "sinks and a window", "soft cap and a window")
CASES = [(shape, scores) for shape in SHAPES for scores in (SCORINGS if shape == "shared heads" else FEW)]
ERROR = 2e-2
"""Of 8 bits of mantissa one rounding is 2e-3; products of weights that were rounded add some."""


def drawn(device, units, num_keys, shape):
    """Rows and a weight of the output, in bf16."""
    heads, kv_heads, dim, value_dim = shape
    draw = torch.Generator().manual_seed(0)
    sizes = ((units, heads, dim), (num_keys, kv_heads, dim), (num_keys, kv_heads, value_dim), (units, heads, value_dim))
    *rows, weight = (torch.randn(size, generator=draw).to(device, torch.bfloat16) for size in sizes)
    return [row.requires_grad_() for row in rows], weight


def scoring_of(name, heads, device):
    options = dict(SCORINGS[name])
    if "sinks_H" in options:
        options["sinks_H"] = options["sinks_H"][:heads].to(device).requires_grad_()
    return Scoring(scale=None, **options)


def dense(rows, documents, scoring, weight):
    """Output, log-sum-exp, and gradients of the weighted sum, of one masked softmax in float64."""
    leaves = [row.detach().double().requires_grad_() for row in rows]
    sinks = None if scoring.sinks_H is None else scoring.sinks_H.detach().double().requires_grad_()
    group = rows[0].shape[1] // rows[1].shape[1]
    query, key, value = (leaves[0], *(row.repeat_interleave(group, dim=1) for row in leaves[1:]))
    lengths, behind = torch.tensor(documents.lengths), documents.num_behind
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.arange(len(document)) + behind
    key_place = torch.arange(documents.num_keys)
    key_document = torch.cat((torch.zeros(behind, dtype=torch.int64), document))[: documents.num_keys]
    seen = (document[:, None] == key_document) & (place[:, None] >= key_place)
    if scoring.window is not None:
        seen &= place[:, None] - key_place < scoring.window
    scores = torch.einsum("qhd,fhd->hqf", query, key) * query.shape[-1] ** -0.5
    scores = scores if scoring.cap is None else scoring.cap * torch.tanh(scores / scoring.cap)
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)), dim=-1)
    output = torch.einsum("hqf,fhe->qhe", scores.softmax(-1)[..., : documents.num_keys], value)
    wanted = leaves if sinks is None else [*leaves, sinks]
    grads = torch.autograd.grad((output * weight.double()).sum(), wanted)
    return output.detach(), scores.logsumexp(-1).T.detach(), grads


def assert_near(found, expected, what):
    # What cancels to nothing, as the gradient of the query of a lone key, is compared with numbers of usual size.
    error = (found.double() - expected).norm() / expected.norm().clamp(min=0.2 * expected.numel() ** 0.5)
    assert error < ERROR, f"{what}: relative error {error:.2e}, at most {ERROR} is allowed"


@pytest.mark.parametrize(("shape", "scores"), CASES)
def test_kernels_give_the_dense_softmax(device, shape, scores, subtests):
    scoring = scoring_of(scores, SHAPES[shape][0], device)
    for name, (lengths, behind) in ROWS.items():
        documents = Documents(lengths=lengths, num_behind=behind, device=device)
        rows, weight = drawn(device, sum(lengths), documents.num_keys, SHAPES[shape])
        output, _, grads = dense(rows, documents, scoring, weight)
        leaves = rows if scoring.sinks_H is None else [*rows, scoring.sinks_H]
        for kernel in (each for each in KERNELS if each.takes(rows, documents, scoring)):
            with subtests.test(kernel=kernel.name, row=name):
                found = kernel.attend(tuple(rows), documents, scoring)
                assert_near(found, output, "output")
                parts = torch.autograd.grad((found * weight).sum(), leaves)
                for what, mine, theirs in zip("qkvs", parts, grads, strict=False):
                    assert_near(mine, theirs, f"gradient of {what}")


@pytest.mark.parametrize(("shape", "scores"), CASES)
@pytest.mark.parametrize("split", [150, 299])
def test_blocks_of_keys_are_terms_of_the_dense_softmax(device, shape, scores, split):
    """As a ring has them: a process's own keys, and those of the slices before, as far as a window lets it see."""
    units, heads = 150, SHAPES[shape][0]
    scoring = scoring_of(scores, heads, device)
    whole = Documents(lengths=(units,), num_behind=split, device=device)
    rows, weight = drawn(device, units, whole.num_keys, SHAPES[shape])
    output, lse, grads = dense(rows, whole, scoring, weight)
    first = split if scoring.window is None else min(scoring.window - 1, split)
    blocks = [block(rows, split, units, 0, scoring)]
    if first:
        blocks.append(block(rows, split - first, first, first, scoring))
    with torch.no_grad():
        merged = Merged.of(block_forward(blocks[0]))
        for each in blocks[1:]:
            merged = merged.with_block(block_forward(each))
        merged = merged.with_sinks(scoring.sinks_H)
        assert_near(merged.output_QHE, output, "output")
        assert_near(merged.lse_QH, lse, "log-sum-exp")
        result = (weight, merged.output_QHE.to(torch.bfloat16), merged.lse_QH)
        totals = [torch.zeros_like(row, dtype=torch.float32) for row in rows]
        for start, each in zip((split, split - first), blocks, strict=False):
            query, *others = block_backward(each, *result)
            totals[0] += query
            for total, own in zip(totals[1:], others, strict=True):
                total[start : start + len(own)] += own
        for what, mine, theirs in zip("qkv", totals, grads, strict=False):
            assert_near(mine, theirs, f"gradient of {what}")
        if scoring.sinks_H is not None:
            assert_near(sinks_backward(scoring.sinks_H, *result), grads[3], "gradient of the sinks")


def block(rows, start, num_keys, num_behind, scoring):
    query, *others = rows
    documents = Documents(lengths=(len(query),), num_behind=num_behind, num_keys=num_keys, device=query.device)
    key, value = (row[start : start + num_keys] for row in others)
    return Block(rows=(query, key, value), documents=documents, scoring=scoring)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 128), (torch.bfloat16, 320)])
def test_no_document_has_all_its_scores_at_once(cuda, dtype, dim):
    """Of shared heads in 32 bits, or wider than 256, which the flash kernel refuses."""
    units, heads = 8192, 8
    rows = [torch.randn(units, own, dim, device=cuda, dtype=dtype, requires_grad=True) for own in (heads, 2, 2)]
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    attend(tuple(rows), Documents(lengths=(units,), device=cuda), Scoring(scale=None)).sum().backward()
    taken = torch.cuda.max_memory_allocated(cuda) - before
    assert taken < heads * units**2 * dtype.itemsize / 2, f"{taken / 2**30:.2f} GiB"


def test_rows_of_many_sizes_need_few_graphs(cuda):
    """FlexAttention is compiled for the first sizes, and for any size after that."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    scoring = Scoring(scale=None, cap=2.0)
    for units in (200, 256, 333, 512, 640, 777, 1000, 1024):
        documents = Documents(lengths=(units - 50, 50), device=cuda)
        rows, weight = drawn(cuda, units, units, SHAPES["shared heads"])
        (KERNELS[1].attend(tuple(rows), documents, scoring) * weight).sum().backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 4, f"{graphs} graphs for 8 sizes"
