"""Attention that reads what neighbouring slots share once, against attention that reads every slot whole."""

from __future__ import annotations

import pytest
import torch

from cosmos_core.rollout.embedded import prefix
from cosmos_core.rollout.embedded.attention import SlotStep
from cosmos_core.rollout.embedded.cache import LayerShape, SlotCache
from cosmos_core.rollout.embedded.interface import Layer, Variant
from cosmos_core.rollout.embedded.prefix import PrefixGroup, prefix_groups

NUM, CAPACITY, SHARED = 9, 48, 21
# Slots 1 to 4 hold one prompt, 5 and 6 another, the rest their own.
RUNS = (PrefixGroup(first=1, last=5, num_units=SHARED), PrefixGroup(first=5, last=7, num_units=SHARED + 9))
VARIANTS = {
    "plain": Variant(scaling=0.2),
    "window": Variant(scaling=0.2, window=17),
    "softcap": Variant(scaling=0.2, softcap=1.5),
    "sinks": Variant(scaling=0.2, sinks_H=torch.linspace(-1, 1, 6)),
}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(PrefixGroup, "pays", lambda run, capacity: True)


def filled(dtype):
    cache = SlotCache(
        {0: LayerShape(num_heads=2, key_dim=8, value_dim=5)},
        num_slots=NUM + 1,
        step=CAPACITY,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    draw = torch.Generator().manual_seed(0)
    for block in cache.layers[0]:
        block.copy_(torch.randn(block.shape, generator=draw))
        for run in RUNS:
            block[run.first : run.last, :, : run.num_units] = block[run.first, :, : run.num_units].clone()
    return cache


def attended(cache, shared, variant, *, dtype):
    places_N = torch.arange(NUM) * 2 + SHARED + 9
    step = SlotStep(cache, slots_N=torch.arange(NUM), places_N=places_N, shared=shared)
    draw = torch.Generator().manual_seed(1)
    sizes = ((6, 8), (2, 8), (2, 5))
    queries, keys, values = (torch.randn(H, NUM, D, generator=draw).to(dtype) for H, D in sizes)
    return step.attend(Layer(0), queries=queries, keys=keys, values=values, variant=variant, extras={})


def test_a_run_attends_as_its_slots_do_one_by_one(monkeypatch):
    for variant in VARIANTS.values():
        for dtype, atol, keys_first in [
            (torch.float32, 1e-6, False),
            (torch.bfloat16, 0.02, False),
            (torch.bfloat16, 0.02, True),
        ]:
            monkeypatch.setattr(prefix, "_KEYS_FIRST", keys_first)
            cache = filled(dtype)
            expected = attended(cache, (), variant, dtype=dtype)
            found = attended(cache, RUNS, variant, dtype=dtype)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def test_what_is_shared_is_read_from_the_first_slot_of_the_run():
    cache = filled(torch.float32)
    expected = attended(cache, (), VARIANTS["plain"], dtype=torch.float32)
    for block in cache.layers[0]:
        for run in RUNS:
            block[run.first + 1 : run.last, :, : run.num_units] = torch.nan
    found = attended(cache, RUNS, VARIANTS["plain"], dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_runs_and_what_is_between_them_cover_every_slot_once():
    found = list(prefix_groups(NUM, RUNS, CAPACITY))
    assert [(run.first, run.last, run.num_units > 0) for run in found] == [
        (0, 1, False),
        (1, 5, True),
        (5, 7, True),
        (7, 9, False),
    ]
    assert [(run.first, run.last) for run in prefix_groups(7, RUNS, CAPACITY)] == [(0, 1), (1, 5), (5, 7)]


def test_sharing_is_for_long_prompts_of_many(monkeypatch):
    for num, num_units, capacity, pays in [
        (16, 399, 416, True),
        (16, 399, 640, False),
        (16, 63, 64, False),
        (2, 399, 416, False),
        (2, 4000, 4032, True),
    ]:
        monkeypatch.undo()
        assert PrefixGroup(first=3, last=3 + num, num_units=num_units).pays(capacity) == pays
