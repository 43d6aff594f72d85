"""The embedded engine on the device: a cache in pages by the real kernel, and steps as real CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_core.models import tokens_payload
from cosmos_core.models.attention import varlen
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, ModelFacts, Request, Sampling
from cosmos_core.weights.shards import canonical_tensors
from tests.families import CONFIGS, family

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler warns of what a device could do, and of what it looks at itself.
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.timeout(300),
]

LENGTHS = (1, 700, 256, 257)
SHAPES = [(8, 2, 64), (4, 4, 128), (4, 1, 256), (4, 2, 72)]
"""Heads, key-value heads, head dim."""
TINY = {**CONFIGS["qwen3"], "head_dim": 64, "initializer_range": 0.15}


def over_pages(device, shape, fed, window, sequences):
    """Some sequences' newest units over a cache whose pages lie in any order, and the same in float64."""
    (heads, kv_heads, dim), draw = shape, torch.Generator().manual_seed(0)
    page = varlen.PAGE if varlen.reads_tables() else 4 * varlen.PAGE
    width, num = 1024 // page, len(LENGTHS)
    cached = [torch.randn(num * width + 1, page, kv_heads, dim, generator=draw).bfloat16() for _ in range(2)]
    table = 1 + torch.randperm(num * width, generator=draw).view(num, width)
    queries = [torch.randn(each, heads, dim, generator=draw).bfloat16() for each in fed]
    outputs = []
    for row in sequences:
        key, value = (block[table[row]].flatten(0, 1)[: LENGTHS[row]].double() for block in cached)
        key, value = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (key, value))
        distance = torch.arange(LENGTHS[row]) - torch.arange(LENGTHS[row])[-fed[row] :, None]
        seen = (distance <= 0) & (distance > -(window or 2000))
        scores = torch.einsum("qhd,fhd->hqf", queries[row].double(), key) * dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqf,fhd->qhd", weights, value))
    ends = torch.tensor([0, *np.cumsum([fed[row] for row in sequences])], dtype=torch.int32)
    lengths = torch.tensor([LENGTHS[row] for row in sequences], dtype=torch.int32)
    numbers = (each.to(device) for each in (ends, lengths, table[list(sequences)].int()))
    pages = varlen.Pages(*numbers, longest=max(fed[row] for row in sequences))
    query = torch.cat([queries[row] for row in sequences]).to(device)
    found = varlen.from_pages(
        query, tuple(map(torch.Tensor.to, cached, [device] * 2)), pages, scale=dim**-0.5, window=window
    )
    return found.cpu(), torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("fed", [(1, 1, 1, 1), (1, 1, 256, 9)])
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_give_the_dense_softmax_and_a_sequence_the_same_in_any_batch(cuda, shape, fed, window):
    found, expected = over_pages(cuda, shape, fed, window, range(4))
    assert (found.double() - expected).norm() / expected.norm() < 2e-2
    if max(fed) == 1:
        alone, _ = over_pages(cuda, shape, fed, window, [1])
        assert torch.equal(alone, found[1:2])


class Tiny:
    """A model without a tokenizer, which an engine of tokens does not need."""

    def facts(self):
        return ModelFacts(
            architecture="Qwen3ForCausalLM",
            num_parameters=0,
            num_layers=TINY["num_hidden_layers"],
            hidden_size=TINY["hidden_size"],
            vocab_size=TINY["vocab_size"],
            tokenizer_size=TINY["vocab_size"],
            context_length=TINY["max_position_embeddings"],
            stop_ids=frozenset({3, 99}),
            pad_id=0,
        )

    def build(self, *, seed, dtype, device, layout=None):
        return family("hf", TINY)().build(seed=seed, dtype=dtype, device=device, layout=layout)


def engine_of(device, **options):
    context = EngineContext(
        model=Tiny(),
        dtype=torch.bfloat16,
        device=device,
        max_in_flight=20,
        context_length=400,
        seed=0,
    )
    engine = PluginSet.load([("engine", "embedded")]).create("engine", "embedded", options, context)
    engine.start()
    return engine


def generated(engine):
    """Of groups that end one by one, over an update which half of them see and over a sleep."""
    draw = np.random.default_rng(0)
    kinds = [{}, {"temperature": 0.7}, {"top_k": 9, "top_p": 0.9}]

    def requests(name, max_units):
        return [
            Request(
                request_id=f"{name}-{index}",
                prompt=tokens_payload(draw.integers(0, 240, 20 + 40 * index)),
                sampling=Sampling(max_units=max_units + 9 * index, num_samples=4, **kinds[index % 3]),
                seed=index,
            )
            for index in range(6)
        ]

    first = [each for handle in engine.submit(requests("first", 20)) for each in handle.result(200)]
    engine.pause()
    engine.sleep()
    engine.wake()
    weights = canonical_tensors(
        engine._context.model.build(seed=3, dtype=torch.bfloat16, device=engine._context.device)
    )
    engine.begin_update(1)
    for piece, _ in engine.layout()[0]:
        engine.write(0, piece, weights[piece.name])
    engine.commit_update("recompute")
    engine.resume()
    second = [each for handle in engine.submit(requests("second", 60)) for each in handle.result(200)]
    return first, second


@pytest.mark.parametrize("compiles", [False, True])
def test_graphs_draw_from_what_the_engine_scores(cuda, compiles, caplog):
    """Log-probs of draws at temperature 1, against forwards without a cache."""
    caplog.set_level("INFO")
    if compiles and not varlen.reads_tables():
        pytest.skip("compiling the forward takes torch 2.13")
    engine = engine_of(cuda, compile=compiles)
    try:
        graphs = engine._graphs
        assert graphs is not None, caplog.text
        for results in generated(engine)[1:]:
            plain = [each.payload for index, each in enumerate(results) if index // 4 % 3 == 0]
            scored = torch.cat(engine.score(plain, temperature=1.0))
            drawn = np.concatenate([np.frombuffer(each.arrays["logprobs"].data, np.float32) for each in plain])
            assert (scored - torch.from_numpy(drawn)).abs().mean() < 0.05
        assert not graphs.refusal, graphs.refusal
        assert len(graphs._graphs) > 2
    finally:
        engine.shutdown()


def test_graphs_give_what_launches_give(cuda):
    """The first units, before a rounding decides a draw; each engine repeats itself to the bit."""
    found = []
    for has_graphs in (True, True, False):
        engine = engine_of(cuda, cuda_graphs=has_graphs)
        try:
            assert (engine._graphs is not None) == has_graphs
            results = generated(engine)
        finally:
            engine.shutdown()
        found.append([each.payload.arrays for group in results for each in group])
    replayed, again, launched = found
    for one, other in zip(replayed, again, strict=True):
        assert one["completion"].data == other["completion"].data
        assert one["logprobs"].data == other["logprobs"].data
    first = [[np.frombuffer(each["completion"].data, np.int32)[:4] for each in run] for run in (replayed, launched)]
    assert np.mean(np.stack(first[0]) == np.stack(first[1])) > 0.9
