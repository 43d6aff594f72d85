from __future__ import annotations

import random

from cosmos_core.rollout.serving.requests import ServedHandle, WaitingQueue
from cosmos_core.rollout.serving.tokens import TokenRequestState


def parent(kit, number, *, priority=0, num_samples=2):
    request = kit.request(number, [4], priority=priority, num_samples=num_samples)
    return TokenRequestState(request, ServedHandle(request), number, [4])


def names(waiting):
    return [(each.parent.number, each.index) for each in (waiting.take() for _ in range(len(waiting)))]


def test_lower_priorities_go_first_then_earlier_requests_then_lower_indices(kit):
    parents = [parent(kit, 1), parent(kit, 2, priority=-1), parent(kit, 3, priority=5), parent(kit, 4)]
    samples = [sample for each in parents for sample in each.samples]
    random.Random(0).shuffle(samples)
    waiting = WaitingQueue()
    waiting.add(samples)
    assert len(waiting) == 8
    assert waiting.first() is parents[1].samples[0]
    assert names(waiting) == [(2, 0), (2, 1), (1, 0), (1, 1), (4, 0), (4, 1), (3, 0), (3, 1)]
    assert not waiting


def test_one_that_was_set_back_goes_before_later_ones(kit):
    first, second = parent(kit, 1), parent(kit, 2)
    waiting = WaitingQueue()
    waiting.add([*first.samples, *second.samples])
    taken = waiting.take()
    waiting.add([taken])
    assert waiting.first() is taken


def test_those_that_are_gone_leave_the_others_in_order(kit):
    parents = [parent(kit, number, priority=number % 3) for number in range(9)]
    waiting = WaitingQueue()
    for each in parents:
        waiting.add(each.samples)
    waiting.remove({*parents[0].samples, parents[4].samples[1]})
    left = names(waiting)
    assert len(left) == 15
    assert left == sorted(left, key=lambda each: (each[0] % 3, *each))
    assert not {(0, 0), (0, 1), (4, 1)} & set(left)
