from __future__ import annotations

import asyncio

import pytest

from cosmos_core.plugins.batching import Batcher


class Doubling:
    def __init__(self, *, size=3, wait_s=0.02):
        self.batches = []
        self.batcher = Batcher(self.run, size=size, wait_s=wait_s)

    async def run(self, items):
        self.batches.append(list(items))
        await asyncio.sleep(0)
        if "bad" in items:
            raise ValueError("a bad batch")
        return [] if "short" in items else [2 * item for item in items]


def gather(batcher, *items):
    async def put_all():
        return await asyncio.gather(*map(batcher.put, items), return_exceptions=True)

    return asyncio.run(put_all())


def test_full_batches_go_at_once_and_the_rest_after_the_wait():
    doubling = Doubling()
    assert gather(doubling.batcher, *range(8)) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert doubling.batches == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_one_goes_alone_on_any_loop():
    doubling = Doubling()
    assert gather(doubling.batcher, 1) == gather(doubling.batcher, 1) == [2]


def test_an_error_is_of_its_batch_and_of_each_in_it():
    first, second, *others = gather(Doubling(size=2).batcher, "bad", "x", 3, 4)
    assert isinstance(first, ValueError)
    assert isinstance(second, ValueError)
    assert others == [6, 8]


def test_another_number_of_results_is_an_error():
    assert {type(each) for each in gather(Doubling().batcher, "short", "x", "y")} == {ValueError}


def test_a_cancelled_item_costs_the_others_nothing():
    async def scenario(doubling):
        first = asyncio.ensure_future(doubling.batcher.put(1))
        second = asyncio.ensure_future(doubling.batcher.put(2))
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.wait_for(second, 5)

    doubling = Doubling()
    assert asyncio.run(scenario(doubling)) == 4
    assert doubling.batches == [[2]]


def test_a_batch_that_hangs_is_given_up_with_the_last_who_waits_for_it():
    turn, ended = asyncio.Lock(), []

    async def run(items):
        async with turn:
            try:
                await asyncio.sleep(60.0 if "hang" in items else 0.0)
            finally:
                ended.append(items)
            return items

    async def scenario():
        batcher = Batcher(run, size=2, wait_s=0.0)
        hanging = [asyncio.ensure_future(batcher.put(item)) for item in ("hang", "beside")]
        await asyncio.sleep(0.01)
        hanging[0].cancel()
        await asyncio.sleep(0.01)
        assert ended == []
        hanging[1].cancel()
        assert await asyncio.wait_for(batcher.put("next"), 5.0) == "next"

    asyncio.run(scenario())
    assert ended == [["hang", "beside"], ["next"]]


def test_what_was_cancelled_with_its_loop_holds_up_nobody():
    doubling = Doubling(wait_s=60.0)

    async def give_up():
        await asyncio.wait_for(doubling.batcher.put(1), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert gather(doubling.batcher, 2, 3, 4) == [4, 6, 8]
    assert doubling.batches == [[2, 3, 4]]
