"""The cache in pages and graphs of decode steps, by stand-ins for their kernels, against the dense cache."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from cosmos_core.errors import EngineError
from cosmos_core.models.attention import varlen
from cosmos_core.protocols import FinishReason
from cosmos_core.protocols.model import Record
from cosmos_core.rollout.embedded import graphs, interface
from cosmos_core.rollout.embedded.cache import LayerShape
from cosmos_core.rollout.embedded.interface import Call, Variant, step_context
from cosmos_core.rollout.embedded.paged import PagedCache, PagedStep, dense_because
from cosmos_core.rollout.embedded.plan import Chunk, Fork, Plan
from cosmos_core.rollout.embedded.plugin import cosmos_engine
from cosmos_core.rollout.serving.requests import place_of
from tests.unit.models.attention.flash import pages_on_cpus
from tests.unit.rollout.embedded.capture import StandIn

PAGE = 8
OPTIONS = {"max_in_flight": 20, "context_length": 96, "prefill_units": 40, "dtype": torch.float64}


@pytest.fixture
def counts(monkeypatch):
    """CPUs capture; what was done."""
    done = collections.Counter()
    monkeypatch.setattr(StandIn, "counts", done)
    monkeypatch.setitem(graphs.CAPTURES, "cpu", StandIn)
    return done


def model(kit):
    """One layer sees all, the other a window that ends within a page."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11, "use_sliding_window": True}
    stops = frozenset(range(0, kit.VOCABULARY, 24))
    return kit.FakeModel(Qwen3Config(**kit.SHAPE, **kinds, tie_word_embeddings=True), stop_ids=stops)


def mixed(kit):
    """Requests of groups and of single samples, drawn in several ways."""
    prompts = [*kit.ragged(10, low=1, high=30), *kit.ragged(2, low=50, high=60), [5]]
    kinds = [{}, {"temperature": 0.7}, {"top_k": 9, "top_p": 0.9}]
    return [
        kit.request(i, prompt, seed=i, num_samples=1 + 3 * i % 5, max_units=12 + 2 * i, **kinds[i % 3])
        for i, prompt in enumerate(prompts)
    ]


def served(kit, engine, monkeypatch):
    """Tokens and log-probs of groups over updates that keep the cache and compute it anew, and over a sleep."""
    with monkeypatch.context() as patches:
        pauses = [
            kit.pause_when(patches, lambda engine, units=units: engine.stats().generated_units >= units)
            for units in (60, 150, 240)
        ]
        handles = engine.submit(mixed(kit))
        for version, paused in enumerate(pauses, 1):
            assert paused.wait(60)
            if version == 3:
                engine.sleep()
                engine.wake()
            kit.load(engine, changed(engine, version), version=version, cache="recompute" if version == 2 else "keep")
            engine.resume()
        return [each for handle in handles for each in handle.result(60)]


def changed(engine, version):
    return engine._context.model.build(seed=version, dtype=torch.float64, device=torch.device("cpu"))


def assert_alike(kit, found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert kit.completion(mine) == kit.completion(theirs)
        assert kit.versions(mine) == kit.versions(theirs)
        np.testing.assert_allclose(kit.logprobs(mine), kit.logprobs(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("reads_tables", [True, False])
def test_pages_and_graphs_generate_what_the_dense_cache_does(kit, make, monkeypatch, counts, reads_tables):
    expected = served(kit, make(model(kit), **OPTIONS), monkeypatch)
    with pages_on_cpus(PAGE, reads_tables):
        for has_graphs in (False, True):
            engine = make(model(kit), **OPTIONS, cuda_graphs=has_graphs)
            assert_alike(kit, served(kit, engine, monkeypatch), expected)
            cache = engine._cache
            assert isinstance(cache, PagedCache)
            assert cache.page == (PAGE if reads_tables else 96)
            assert not any(cache._pages)
            assert sorted(cache._free) == list(range(1, len(cache._counts)))
            assert bool(counts) == has_graphs
    # Graphs were made anew when the pool grew, and when the engine slept; most steps were replays.
    assert counts["pools"] > 3
    assert counts["streams"] == 1
    assert counts["replays"] > counts["captures"] > 5


NUM_PAGES = 16
FEW_PAGES = (1 + NUM_PAGES) * PAGE * 2 * 2 * 16 * 8 / 2**30
"""GiB of so many pages, and one beside them: 2 layers of 2 heads of 8 values, keys and values, in float64."""


def set_back(engine):
    """Samples that wait with units that they have generated."""
    return [entry[-1] for entry in engine._scheduler._waiting._heap if entry[-1].num_generated]


@pytest.fixture
def scarce(kit, make, monkeypatch, counts):
    """An engine with few pages, of which it never has more, and the event of its pause once samples were set back."""
    prepare = PagedCache.prepare

    def few(cache, plan):
        prepare(cache, plan)
        assert cache.bound is None or len(cache._counts) <= cache.bound == 1 + NUM_PAGES

    monkeypatch.setattr(PagedCache, "prepare", few)
    with pages_on_cpus(PAGE):
        paused = kit.pause_when(monkeypatch, lambda engine: len(set_back(engine)) >= 2)
        yield make(model(kit), **OPTIONS, cache_gib=FEW_PAGES), paused


def assert_given_back(engine):
    engine._prefixes.clear()
    assert not any(engine._cache._pages)
    assert sorted(engine._cache._free) == list(range(1, len(engine._cache._counts)))
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)


def test_sequences_without_room_wait_and_go_on_where_they_were(kit, make, scarce):
    """All but what is aborted while it is set back are what they are in a cache without a bound."""
    engine, paused = scarce
    handles = engine.submit(mixed(kit))
    assert paused.wait(60)
    gone = set_back(engine)[0]
    assert max(map(place_of, engine._scheduler._running)) < min(map(place_of, set_back(engine)))
    engine.abort([gone.parent.request.request_id])
    engine.resume()
    whole = make(model(kit), **OPTIONS)
    for handle, expected in zip(handles, whole.submit(mixed(kit)), strict=True):
        found, afresh = handle.result(60), expected.result(60)
        if handle.request.request_id != gone.parent.request.request_id:
            assert_alike(kit, found, afresh)
            continue
        cut, other = found[gone.index], afresh[gone.index]
        assert cut.reason is FinishReason.ABORTED
        assert kit.completion(cut) == kit.completion(other)[: gone.num_generated] != []
        np.testing.assert_allclose(kit.logprobs(cut), kit.logprobs(other)[: gone.num_generated], atol=1e-5, rtol=0)
    assert (engine.stats().preempted > 2, whole.stats().preempted) == (True, 0)
    assert_given_back(engine)
    with pytest.raises(EngineError, match=r"'long': a prompt of 90 and .* need 18 pages of 8 units, and .* holds 16"):
        make(model(kit), **{**OPTIONS, "context_length": 200}, cache_gib=FEW_PAGES).submit(
            [kit.request("long", [5] * 90, max_units=50)]
        )


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_what_is_set_back_under_an_update_has_the_units_that_it_had(kit, scarce, cache):
    engine, paused = scarce
    handles = engine.submit([each for each in mixed(kit) if not each.sampling.top_k])
    assert paused.wait(60)
    before = {each: (each.tokens[:], each.logprobs[:]) for state in engine._in_flight() for each in state.samples}
    modules = [changed(engine, version) for version in (1, 2)]
    kit.load(engine, modules[1], version=1, cache=cache)
    engine.resume()
    for handle in handles:
        prompt = np.frombuffer(handle.request.prompt.arrays["prompt"].data, np.int32).tolist()
        for made in handle.result(60):
            own, versions = kit.completion(made), np.array(kit.versions(made))
            temperature = handle.request.sampling.temperature
            old, new = (kit.plain_logprobs(each, prompt, own, temperature=temperature) for each in modules)
            expected = np.where(versions == 1, new, old)
            at = slice(None) if cache == "recompute" else versions == 0
            np.testing.assert_allclose(kit.logprobs(made)[at], expected[at], atol=2e-5, rtol=0)
    for sample, (tokens, logprobs) in before.items():
        assert (sample.tokens[: len(tokens)], sample.logprobs[: len(logprobs)]) == (tokens, logprobs)
    assert engine.stats().preempted > 2
    assert_given_back(engine)


def test_there_are_graphs_for_one_row_up_to_all():
    assert graphs.sizes(1) == [1]
    assert graphs.sizes(3) == [1, 2, 3]
    assert graphs.sizes(16) == [1, 2, 4, 8, 16]
    assert graphs.sizes(50) == [1, 2, 4, 8, 16, 32, 48, 50]


def test_padding_draws_for_nobody_and_attends_to_one_unit(kit, make, counts, monkeypatch):
    """Whatever is left in slots that are empty again."""
    attend, lengths = varlen.from_pages, []
    monkeypatch.setattr(
        varlen, "from_pages", lambda *args, **options: lengths.append(args[2].lengths) or attend(*args, **options)
    )
    with pages_on_cpus(PAGE):
        engine = make(kit.FakeModel(stop_ids=frozenset()), max_in_flight=7)
        first = [kit.request(i, [4, 5], seed=i, max_units=3) for i in range(7)]
        for handle in engine.submit(first):
            handle.result(20)
        before, lengths[:] = engine._numbers._ints.clone(), []
        long = kit.request("long", [6, 7, 8], max_units=20, num_samples=5)
        module = kit.reference()
        for generated in engine.submit([long])[0].result(20):
            own = kit.plain_logprobs(module, [6, 7, 8], kit.completion(generated))
            np.testing.assert_allclose(kit.logprobs(generated), own, atol=2e-5, rtol=0)
        assert counts["replays"] >= 17
        assert torch.equal(engine._numbers._ints[5:], before[5:])
        padded = [each[5:] for each in lengths if len(each) == 7]
        assert padded
        assert all((each == 1).all() for each in padded)


def test_a_forward_that_waits_for_the_device_is_told_once_and_decodes_without_graphs(kit, make, counts, caplog):
    """That of a rotary embedding which looks at the longest position."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    waits = kit.FakeModel(Qwen3Config(**kit.SHAPE, rope_parameters=rope), stop_ids=frozenset())
    with pages_on_cpus(PAGE):
        engine = make(waits, cuda_graphs=True)
        for prompt in kit.ragged(2):
            generated = engine.submit([kit.request("a", prompt)])[0].result(20)[0]
            own = kit.plain_logprobs(kit.reference(waits), prompt, kit.completion(generated))
            np.testing.assert_allclose(kit.logprobs(generated), own, atol=2e-5, rtol=0)
    assert counts["captures"] == 1
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "a step of 1 sequences cannot be captured as a CUDA graph: operation not permitted when stream" in told
    assert "second line" not in told


def test_steps_of_a_model_that_records_its_forwards_are_not_captured(kit, make, counts, caplog):
    caplog.set_level("INFO")
    make()
    assert (
        "the KV cache is dense, since the device is cpu; steps that only decode are launched kernel by" in caplog.text
    )
    recording = kit.FakeModel()
    recording.records = lambda: [Record(name="experts", dtype="int32", shape=(1,), option="model.options.replay")]
    recording.record = lambda module: dict
    recording.counters, recording.after_step = lambda module: (), lambda module: {}
    with pages_on_cpus(PAGE):
        assert make(recording)._graphs is None
        make()
    assert "the KV cache is in pages of 8 units; steps that only decode are replayed as CUDA graphs" in caplog.text
    assert "launched kernel by kernel, since the model records its forwards" in caplog.text


# -- the cache --------------------------------------------------------------------------------------------------------


def made(num_slots=6, context_length=40):
    shapes = {0: LayerShape(num_heads=2, key_dim=8, value_dim=8)}
    parts = {"num_slots": num_slots, "longest": context_length, "dtype": torch.float32}
    return PagedCache(shapes, device=torch.device("cpu"), **parts)


@pytest.fixture
def cache():
    with pages_on_cpus(PAGE):
        yield made()


def prepare(cache, lengths, *, chunks=(), forks=()):
    chunks = [Chunk(first=0, last=lengths[slot] - start, start=start, slot=slot) for slot, start in chunks]
    forks = [Fork(source=source, targets=targets, num_units=size) for source, targets, size in forks]
    cache.prepare(Plan(lengths=lengths, longest=40, num_decoding=0, chunks=tuple(chunks), forks=tuple(forks)))
    held = cache.table.tolist()
    assert [[page for page in row if page] for row in held] == cache._pages
    counts = collections.Counter(page for row in cache._pages for page in row)
    assert cache._counts == [counts[page] for page in range(len(cache._counts))]
    assert sorted(cache._free) == [page for page in range(1, len(cache._counts)) if not counts[page]]
    return cache._pages


def test_a_fork_shares_the_pages_that_its_units_fill(cache):
    pages = prepare(cache, [21, 21, 17], chunks=[(0, 0)], forks=[(0, (1, 2), 17)])
    assert pages[0][:2] == pages[1][:2] == pages[2][:2]
    assert len({pages[0][2], pages[1][2], pages[2][2]}) == 3
    ((source, target),) = cache.copies([Fork(source=0, targets=(1, 2), num_units=17)])
    assert source.tolist() == [pages[0][2] * PAGE]
    assert target.tolist() == [[pages[1][2] * PAGE], [pages[2][2] * PAGE]]
    assert not list(cache.copies([Fork(source=0, targets=(1, 2), num_units=16)]))


def test_what_a_fork_was_given_in_the_step_is_copied_before_it_is_given_on(cache):
    forks = [(0, (1,), 11), (1, (2, 3), 12)]
    pages = prepare(cache, [14, 12, 12, 12], forks=forks)
    first, second = cache.copies([Fork(source=s, targets=t, num_units=u) for s, t, u in forks])
    assert first[1].tolist() == [[pages[1][1] * PAGE + unit for unit in range(3)]]
    assert second[0].tolist() == [pages[1][1] * PAGE + unit for unit in range(4)]
    assert second[1].shape == (2, 4)


def test_what_is_begun_anew_is_written_where_nobody_reads(cache):
    """An update begins a prompt anew that was not done, while another goes on with the pages that both share."""
    pages = prepare(cache, [20, 25], chunks=[(0, 0)], forks=[(0, (1,), 20)])
    kept = pages[0].copy()
    prepare(cache, [21, 25], chunks=[(1, 0)])
    assert pages[0] == kept
    assert not set(pages[1]) & set(kept)


def test_what_is_attended_lies_as_a_compiled_forward_expects(cache):
    """By tokens, also where a model's queries lie by heads, as the kernel's output then does."""
    prepare(cache, [3], chunks=[(0, 0)])
    units = torch.arange(3)
    step = PagedStep(cache, slots_N=units * 0, places_N=units, chunks=[Chunk(first=0, last=3, start=0, slot=0)])
    rows = {name: torch.randn(2, 3, 8) for name in ("queries", "keys", "values")}
    with step_context(step):
        attended = interface._attend_now(*rows.values(), 0, 1.0, None, None, None)
    assert attended.is_contiguous()


def test_slots_move_without_a_copy_and_their_pages_are_given_back(cache):
    pages = prepare(cache, [9, 17, 3, 25], chunks=[(slot, 0) for slot in range(4)])
    third, layers = pages[3].copy(), cache.layers[0]
    cache.move([3], [1], 25)
    cache.release(2)
    prepare(cache, [9, 25])
    assert pages[1] == third
    assert not pages[2]
    assert not pages[3]
    assert cache.layers[0] is layers


def test_memory_grows_by_half_up_to_what_all_slots_need_and_keeps_what_is_there(cache):
    held, generations = [], []
    prepare(cache, [1] * 6, chunks=[(slot, 0) for slot in range(6)])
    for block in cache.layers[0]:
        block.copy_(torch.arange(block.numel()).view(block.shape))
    expected = [block.clone() for block in cache.layers[0]]
    for length in range(1, 41):
        prepare(cache, [length] * 6)
        held.append(len(cache.layers[0][0]))
        generations.append(cache.generation)
    for block, before in zip(cache.layers[0], expected, strict=True):
        assert torch.equal(block[:7], before)
        assert not block[7:].any()
    assert held[-1] == 1 + 6 * 5
    assert len(set(held)) == len(set(generations)) < 6
    cache.clear()
    assert all(block.numel() == 0 for block in cache.layers[0])
    prepare(cache, [9])
    assert len(cache.layers[0][0]) == 3


def test_plans_count_pages_as_they_are():
    assert cosmos_engine().capabilities.cache_page == varlen.PAGE


def test_a_cache_is_dense_where_the_kernel_cannot_read_pages(monkeypatch):
    monkeypatch.setattr(varlen, "widest", lambda _: 256)
    for device, dtype, dims, variant, reason in [
        ("cuda", torch.bfloat16, (128, 128), {}, ""),
        ("cuda", torch.float16, (256, 256), {"window": 5}, ""),
        ("cpu", torch.bfloat16, (128, 128), {}, "the device is cpu"),
        ("cuda", torch.float32, (128, 128), {}, "16 bits, and the dtype is torch.float32"),
        ("cuda", torch.bfloat16, (192, 128), {}, "keys have 192 values and values 128"),
        ("cuda", torch.bfloat16, (12, 12), {}, "heads have 12 values"),
        ("cuda", torch.bfloat16, (264, 264), {}, "heads have 264 values"),
        ("cuda", torch.bfloat16, (64, 64), {"softcap": 3.0}, "soft caps"),
        ("cuda", torch.bfloat16, (64, 64), {"sinks_H": torch.zeros(2)}, "sinks"),
    ]:
        shape = LayerShape(num_heads=2, key_dim=dims[0], value_dim=dims[1])
        calls = [Call(shape=shape, variant=Variant(scaling=1.0, **variant))]
        found = dense_because(calls, dtype, torch.device(device))
        assert reason in found if reason else not found
    monkeypatch.setattr(varlen, "widest", lambda _: 0)
    assert (
        varlen.refusal_of_pages(torch.bfloat16, torch.device("cuda"), 64, 64)
        == "the GPU has no kernel of FlashAttention"
    )
