from __future__ import annotations

import torch

from cosmos_core.rollout.embedded.cache import LayerShape, SlotCache

SLOTS, HEADS = 3, 2
# Layers 0 and 1 are of one size, keys and values of layer 2 differ from each other and from these.
SHAPES = {
    0: LayerShape(num_heads=HEADS, key_dim=4, value_dim=4),
    1: LayerShape(num_heads=HEADS, key_dim=4, value_dim=4),
    2: LayerShape(num_heads=HEADS, key_dim=3, value_dim=5),
}


def make(shapes=SHAPES):
    return SlotCache(shapes, num_slots=SLOTS, step=8, dtype=torch.float32, device=torch.device("cpu"))


def fill(cache, num_units, *, seed=0):
    """Write all slots; returns what was written."""
    draw = torch.Generator().manual_seed(seed)
    written = {}
    for layer, (keys, values) in cache.layers.items():
        written[layer] = (
            torch.randn(*keys.shape[:2], num_units, keys.shape[3], generator=draw),
            torch.randn(*values.shape[:2], num_units, values.shape[3], generator=draw),
        )
        keys[:, :, :num_units], values[:, :, :num_units] = written[layer]
    return written


def check(cache, written, num_used, num_units):
    for layer, (keys, values) in written.items():
        found_keys, found_values = cache.layers[layer]
        torch.testing.assert_close(found_keys[:num_used, :, :num_units], keys[:num_used, :, :num_units])
        torch.testing.assert_close(found_values[:num_used, :, :num_units], values[:num_used, :, :num_units])


def test_what_is_kept_stays_over_every_change_of_capacity():
    cache = make()
    written = fill(cache, 8)
    # It grows beyond what it has ever had, within it, and shrinks; two slots are in use.
    for num_units, capacity in ((9, 16), (40, 40), (17, 40), (9, 16), (33, 40), (8, 8), (39, 40), (50, 56)):
        cache.fit(num_units, 2, longest=1000)
        assert cache.capacity == capacity
        check(cache, written, 2, 8)
        for keys, values in cache.layers.values():
            assert keys.shape[2] == values.shape[2] == capacity
            assert keys.is_contiguous()
            assert values.is_contiguous()


def test_blocks_of_layers_never_overlap():
    cache = make()
    for num_units in (20, 40, 9, 40, 8, 33):
        cache.fit(num_units, SLOTS, longest=1000)
        written = fill(cache, num_units, seed=num_units)
        check(cache, written, SLOTS, num_units)


def test_nothing_in_it_is_ever_not_a_number():
    cache = make()
    fill(cache, 8)
    for num_units, num_used in ((30, 1), (16, 0), (64, 2), (8, 0)):
        cache.fit(num_units, num_used, longest=1000)
        assert all(block.isfinite().all() for blocks in cache.layers.values() for block in blocks)


def test_memory_is_asked_for_only_when_it_has_never_been_so_large(monkeypatch):
    cache = make()
    sizes = []
    monkeypatch.setattr(torch, "zeros_like", lambda each: sizes.append(each.numel()) or each.new_zeros(each.shape))
    cache.fit(64, 0, longest=1000)
    addresses = {block.data_ptr() for blocks in cache.layers.values() for block in blocks}
    for num_units in (8, 40, 16, 64):
        cache.fit(num_units, 0, longest=1000)
        assert {block.data_ptr() for blocks in cache.layers.values() for block in blocks} == addresses
    cache.fit(8, 0, longest=1000)
    cache.fit(40, 1, longest=1000)
    # One spare block of each size, whatever the number of layers.
    assert len(sizes) == len(set(sizes)) == 3


def test_with_nothing_to_keep_the_capacity_is_what_is_needed():
    for num_units in [1, 8]:
        cache = make()
        cache.fit(100, 0, longest=1000)
        cache.fit(num_units, 0, longest=1000)
        assert cache.capacity == 8


def test_it_holds_no_more_than_the_longest_slot_may_come_to_need():
    held = []
    cache = make()
    for num_units in range(1, 91):
        cache.fit(num_units, 2, longest=90)
        held.append(sum(block.untyped_storage().nbytes() for blocks in cache.layers.values() for block in blocks))
    a_unit = held[0] // 8
    # 90 units, rounded up to a step of 8; asked for a few times, and not at each step.
    assert held[-1] == max(held) == 96 * a_unit
    assert len(set(held)) < 8
    cache.fit(110, 2, longest=90)
    assert cache.capacity == 112
