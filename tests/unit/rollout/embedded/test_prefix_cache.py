"""Dialogues whose turns go on in the cache of the turn before, against the same ones processed from their beginning."""

from __future__ import annotations

import collections
import contextlib

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.protocols import FinishReason
from cosmos_core.protocols.model import Record
from cosmos_core.rollout.embedded import graphs
from cosmos_core.rollout.embedded.cache import LayerShape, SlotCache
from cosmos_core.rollout.embedded.paged import PagedCache
from cosmos_core.rollout.embedded.plan import Plan
from cosmos_core.rollout.embedded.prefix import PrefixGroup
from cosmos_core.rollout.embedded.prefix_cache import PrefixCache
from cosmos_core.rollout.serving.requests import ServedHandle
from cosmos_core.rollout.serving.tokens import TokenRequestState
from tests.unit.models.attention.flash import pages_on_cpus
from tests.unit.rollout.embedded.capture import StandIn

PAGE, TURNS = 8, 5
CACHES = {
    "dense": contextlib.nullcontext,
    "pages": lambda: pages_on_cpus(PAGE),
    "a page each": lambda: pages_on_cpus(PAGE, reads_tables=False),
}


@pytest.fixture(params=["dense", "pages"])
def lies(request, monkeypatch):
    """Each way in which the cache can lie; decode steps are graphs where it is in pages."""
    monkeypatch.setattr(StandIn, "counts", collections.Counter())
    monkeypatch.setitem(graphs.CAPTURES, "cpu", StandIn)
    with CACHES[request.param]():
        yield request.param


@pytest.fixture
def talking(kit, make):
    def start(*, prefix_cache=1.0, records=False, dialogues=True, **options):
        model = kit.FakeModel(stop_ids=frozenset(range(0, kit.VOCABULARY, 16)))
        if records:
            model.records = lambda: [Record(name="fed", dtype="int64", shape=(), option="model.options.replay")]
            model.record, model.counters, model.after_step = fed, lambda _: (), lambda _: {}
        sizes = {"max_in_flight": 12, "context_length": 136, "prefill_units": 40, "dtype": torch.float64, **options}
        return make(model, dialogues=dialogues, prefix_cache=prefix_cache, **sizes)

    return start


def fed(module):
    """A model that records which tokens it was fed, and at which places."""
    newest = {}

    def note(_, args, kwargs):
        newest["fed"] = 1000 * kwargs["position_ids"][0] + kwargs["input_ids"][0]

    module.register_forward_pre_hook(note, with_kwargs=True)
    return lambda: newest


def next_turn(kit, made, number):
    """All that came before, and an observation."""
    so_far = np.frombuffer(made.payload.arrays["prompt"].data, np.int32).tolist() + kit.completion(made)
    return [*so_far, *kit.ragged(1, low=1, high=9, seed=number)[0]]


def turn(kit, engine, number, prompts, **changes):
    """One turn of each dialogue, as requests of one sample that come together; a third of them drawn otherwise."""
    room = {"max_units": 12, **changes}
    kinds = [{}, {"temperature": 0.7}, {"top_k": 9, "top_p": 0.9}]
    return [
        made
        for handle in engine.submit(
            kit.request(f"{number}/{place}", prompt, seed=7 * number + place, **{**kinds[place % 3], **room})
            for place, prompt in enumerate(prompts)
        )
        for made in handle.result(60)
    ]


def play(kit, engine, turns=TURNS):
    """All turns of some dialogues, the first of a group among them."""
    (group,) = engine.submit([kit.request("group", [9, 8, 7] * 4, seed=3, num_samples=4, max_units=12)])
    made = [*turn(kit, engine, 0, kit.ragged(5)), *group.result(60)]
    turns_made = [made]
    for number in range(1, turns):
        made = turn(kit, engine, number, [next_turn(kit, each, number) for each in made])
        turns_made.append(made)
    return turns_made


def assert_alike(kit, found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert kit.completion(mine) == kit.completion(theirs)
        np.testing.assert_allclose(kit.logprobs(mine), kit.logprobs(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lies", CACHES, indirect=True)
def test_a_turn_in_the_cache_of_the_one_before_is_what_it_is_afresh(kit, talking, lies):
    afresh, engine = talking(prefix_cache=0.0, dtype=torch.float32), talking(dtype=torch.float32)
    expected, found = play(kit, afresh), play(kit, engine)
    for mine, theirs in zip(found, expected, strict=True):
        assert_alike(kit, mine, theirs)
    known, whole = engine.stats(), afresh.stats()
    assert (whole.cached_units, whole.evicted_units, known.evicted_units) == (0, 0, 0)
    assert known.prompt_units + known.cached_units == whole.prompt_units
    # Of each turn but the first, all but the last unit of the one before.
    held = [each.payload.arrays["prompt"].shape[0] + each.num_units - 1 for made in found[:-1] for each in made]
    assert known.cached_units == sum(held)
    assert isinstance(engine._cache, SlotCache if lies == "dense" else PagedCache)


def test_nothing_is_reused_that_older_weights_computed_unless_the_cache_is_kept(kit, talking, lies):
    for cache in ("recompute", "keep"):
        afresh, engine = talking(prefix_cache=0.0), talking()
        first = turn(kit, engine, 0, kit.ragged(6))
        second = [next_turn(kit, each, 1) for each in first]
        for each in (engine, afresh):
            module = each._context.model.build(seed=2, dtype=torch.float64, device=torch.device("cpu"))
            kit.load(each, module, version=1, cache=cache)
        found, expected = turn(kit, engine, 1, second), turn(kit, afresh, 1, second)
        if cache == "recompute":
            assert engine.stats().cached_units == 0
            assert_alike(kit, found, expected)
        else:
            assert engine.stats().cached_units > 0
            assert [kit.completion(each) for each in found] != [kit.completion(each) for each in expected]
        assert all(set(kit.versions(each)) == {1} for each in found)
        # What the new weights computed is there for the turn after.
        before = engine.stats().cached_units
        turn(kit, engine, 2, [next_turn(kit, each, 2) for each in found])
        assert engine.stats().cached_units > before
        # Memory that is given up keeps nothing.
        engine.pause("keep")
        engine.sleep()
        engine.wake()
        kit.load(engine, module, version=2)
        engine.resume()
        before = engine.stats().cached_units
        assert_alike(kit, turn(kit, engine, 1, second), expected)
        assert engine.stats().cached_units == before


@pytest.mark.parametrize("budget", [2048, 40])
def test_a_beginning_of_prompts_in_flight_is_processed_once_under_each_weights(kit, talking, lies, monkeypatch, budget):
    """Of three prompts that are one, three that are longer, three that differ later, and one that is shorter."""
    monkeypatch.setattr(PrefixGroup, "pays", lambda group, capacity: True)
    begin, ends = kit.ragged(1, low=60, high=61, seed=4)[0], kit.ragged(6, low=1, high=9, seed=5)
    prompts = [begin] * 3 + [[*begin, *end] for end in ends[:3]] + [[*begin[:50], *end] for end in ends[3:]]
    prompts.append(begin[:44])
    sizes = {"prefill_units": budget, "max_in_flight": 16}
    afresh, engine = talking(dialogues=False, **sizes), talking(**sizes)
    assert_alike(kit, (made := turn(kit, engine, 0, prompts)), turn(kit, afresh, 0, prompts))
    before = engine.stats()
    assert before.prompt_units + before.cached_units == sum(map(len, prompts))
    # The shorter one feeds its last unit: it draws from that.
    assert before.prompt_units == len(begin) + sum(map(len, ends)) + 1
    # What is in flight over the old weights is no beginning of others, nor are turns that go on over it.
    paused = kit.pause_when(monkeypatch, lambda engine: engine.stats().generated_units > before.generated_units + 2)
    (old,) = engine.submit([kit.request("old", begin, max_units=60, seed=4, num_samples=2)])
    assert paused.wait(20)
    for loaded in (engine, afresh):
        module = loaded._context.model.build(seed=2, dtype=torch.float64, device=torch.device("cpu"))
        kit.load(loaded, module, version=0, cache="keep")
    on = next_turn(kit, made[3], 1)
    (held,) = engine.submit([kit.request("held", on, max_units=30, seed=5, num_samples=2)])
    assert not old.is_done
    begun = engine.stats()
    engine.resume()
    assert_alike(kit, turn(kit, engine, 1, prompts), turn(kit, afresh, 1, prompts))
    assert all(handle.result(20) for handle in (held, old))
    fed = len(on) - len(prompts[3]) - made[3].num_units + 1
    assert engine.stats().prompt_units == begun.prompt_units + before.prompt_units + fed


def test_records_of_units_that_were_kept_come_along(kit, talking, lies):
    for made in play(kit, talking(records=True)):
        for each in made:
            ids = next_turn(kit, each, 0)
            rows = np.frombuffer(each.payload.arrays["fed"].data, np.int64)
            size = each.payload.arrays["prompt"].shape[0] + each.num_units - 1
            assert rows.tolist() == [1000 * place + token for place, token in enumerate(ids[:size])]


def test_what_is_kept_gives_way_and_is_counted(kit, talking, lies):
    """Twelve dialogues at a time, of 36, with room for six that wait: the newest, which go on first, are found."""
    engine, afresh = talking(prefix_cache=0.5), talking(prefix_cache=0.0)
    prompts = kit.ragged(36, low=20, high=30)
    made = turn(kit, engine, 0, prompts)
    kept = engine._prefixes._kept
    assert sum(each.size for each in kept) == engine._prefixes._size <= 6 * engine._cache.size_of(30 + 12)
    assert engine.stats().evicted_units == sum(
        each.payload.arrays["prompt"].shape[0] + each.num_units - 1 for each in made
    ) - sum(each.num_units for each in kept)
    assert engine.stats().evicted_units > 0
    second = [next_turn(kit, each, 1) for each in reversed(made)]
    assert_alike(kit, turn(kit, engine, 1, second), turn(kit, afresh, 1, second))
    assert engine.stats().cached_units > 0
    if lies != "dense":
        cache = engine._cache
        most = max(map(len, second)) + 12
        assert len(cache._counts) <= 1 + 12 * cache.size_of(most) // cache.page
        engine._prefixes.clear()
        assert sorted(cache._free) == list(range(1, len(cache._counts)))


@pytest.mark.parametrize("lies", ["pages"], indirect=True)
def test_dialogues_in_few_pages_are_what_they_are_in_many(kit, talking, lies, monkeypatch):
    """Turns that are kept give way first, then sequences in flight; prompts share beginnings all the while."""
    begin, prepare = kit.ragged(1, low=34, high=35, seed=4)[0], PagedCache.prepare

    def bounded(cache, plan):
        prepare(cache, plan)
        assert cache.bound is None or len(cache._counts) <= cache.bound == 22

    monkeypatch.setattr(PagedCache, "prepare", bounded)
    afresh, engine = talking(prefix_cache=0.0), talking(cache_gib=22 * PAGE * 2 * 2 * 16 * 8 / 2**30)
    made, others = ([[*begin, *end] for end in kit.ragged(12, low=2, high=30)] for _ in range(2))
    for number in range(4):
        made, others = (turn(kit, each, number, asked) for each, asked in ((engine, made), (afresh, others)))
        assert_alike(kit, made, others)
        made, others = ([next_turn(kit, each, number) for each in reversed(asked)] for asked in (made, others))
    stats, cache = engine.stats(), engine._cache
    assert min(stats.preempted, stats.evicted_units, stats.cached_units) > 0
    engine._prefixes.clear()
    assert sorted(cache._free) == list(range(1, len(cache._counts)))


def test_only_a_prompt_that_begins_with_all_tokens_of_a_text_that_ended_goes_on(kit, talking, monkeypatch):
    engine = talking()
    (made,) = turn(kit, engine, 0, [[5, 6, 7]], max_units=4, top_k=1)
    whole = [5, 6, 7, *kit.completion(made)]
    others = [whole[:-1], [*whole[:-1], whole[-1] + 1, 4], [4, *whole[1:], 4]]
    for number, other in enumerate(others, 1):
        turn(kit, engine, number, [other])
        assert engine.stats().cached_units == 0
    # Nothing need follow; once gone on with, it is there no more.
    for number in (5, 6):
        turn(kit, engine, number, [whole])
        assert engine.stats().cached_units == len(whole) - 1
    before = engine.stats()
    paused = kit.pause_when(monkeypatch, lambda engine: engine.stats().generated_units == before.generated_units + 1)
    (held,) = engine.submit([kit.request("held", [40, 41, 42], max_units=60, seed=5)])
    assert paused.wait(20)
    engine.pause("abort")
    engine.resume()
    (ended,) = held.result(20)
    assert (ended.reason, ended.num_units) == (FinishReason.ABORTED, 1)
    turn(kit, engine, 7, [[40, 41, 42, *kit.completion(ended), 4]])
    assert engine.stats().cached_units == before.cached_units


def test_tokens_do_not_say_what_an_image_shows(kit):
    cache = SlotCache({}, num_slots=2, step=32, dtype=torch.float32, device=torch.device("cpu"))
    prefixes = PrefixCache(cache, num_slots=2, share=1.0)
    request = kit.request("one", [3] * 10, max_units=40)
    text = TokenRequestState(request, ServedHandle(request), 0, [3] * 10)
    image = attrs.evolve(text, conditioning=object())
    for ended, begun in ((image, text), (image, image), (text, image)):
        prefixes.keep(ended.samples[0])
        assert prefixes.find(begun.samples[0]) is None
    assert prefixes.find(text.samples[0]) is not None


def test_what_runs_has_pages_before_what_is_kept():
    """Three slots of two pages: what two that ended have is kept until all of it is needed, the oldest first."""
    shapes = {0: LayerShape(num_heads=1, key_dim=8, value_dim=8)}
    with pages_on_cpus(PAGE):
        cache = PagedCache(shapes, num_slots=3, longest=40, dtype=torch.float32, device=torch.device("cpu"))
    given = []
    cache.prepare(Plan(lengths=[16, 16, 9], longest=16, num_decoding=0))
    held = [cache.keep(slot, 15) for slot in (0, 1)]

    def evict():
        given.append(held.pop(0))
        cache.drop(given[-1])
        return True

    cache.evict = evict
    cache.release(0)
    cache.prepare(Plan(lengths=[16], longest=16, num_decoding=0))
    assert not given
    cache.prepare(Plan(lengths=[16, 9], longest=16, num_decoding=0))
    assert len(given) == 1
    assert len(cache._counts) == 7
