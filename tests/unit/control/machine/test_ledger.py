from __future__ import annotations

from cosmos_core.control.machine.ledger import Ledger
from cosmos_core.control.machine.records import MOST_REASONS, OTHER_REASONS
from cosmos_core.transport.directives import GroupRef


def finished(position, samples=()):
    return GroupRef(position=position, row=position, lease=position + 10, holder="r0", samples=tuple(samples))


def test_what_came_back_is_given_out_first(make_sample):
    ledger = Ledger()
    assert [ledger.lease(number) for number in (1, 2, 3)] == [0, 1, 2]
    ledger.requeue(2)
    ledger.requeue(0)
    assert [ledger.lease(number) for number in (4, 5, 6)] == [0, 2, 3]


def test_samples_are_counted_where_they_end(make_sample):
    ledger = Ledger()
    for lease in range(4):
        ledger.lease(lease)
    samples = [make_sample(0), make_sample(1, status="reward_failed")]
    for position in range(4):
        ledger.finish(finished(position, samples))
    ledger.batch([0, 1])
    ledger.consume(0)
    ledger.release(1)
    ledger.requeue(1)
    ledger.drop(2, "stale")
    counts = ledger.samples
    assert (counts.generated, counts.consumed, ledger.num_held) == (8, 1, 2)
    assert counts.dropped == {"reward_failed": 1, "lost": 2, "stale": 2}
    assert (counts.units, counts.wasted) == (8 * 10, 5 * 10)
    assert (ledger.consumed, ledger.dropped, ledger.num_live) == (1, {"stale": 1}, 1)


def test_a_group_weighs_as_many_units_as_training_processes(make_sample):
    sample = make_sample()
    assert finished(0, [sample, sample]).num_units == 2 * (sample.num_units + sample.num_prompt_units)
    assert finished(0).num_units == 1, "a demonstration, whose length nobody knows yet"


def test_a_restored_ledger_queues_all_that_was_live(make_sample):
    ledger = Ledger()
    for lease in range(4):
        ledger.lease(lease)
    ledger.finish(finished(1, [make_sample()]))
    ledger.requeue(0)
    mark = ledger.mark()
    ledger.drop(2, "stale")
    restored = Ledger.restore(mark)
    assert restored.queued == [0, 1, 2, 3]
    assert restored.dropped == {}
    assert restored.samples.dropped == {"lost": 1}
    assert (restored.samples.units, restored.samples.wasted) == (10, 10)
    restored.samples.drop("stale", 1, 10)
    assert mark.samples.dropped == {}


def test_a_mark_holds_what_was_live_in_ranges_and_gives_each_position_back():
    ledger = Ledger()
    for lease in range(9):
        ledger.lease(lease)
    for position in (0, 3, 4):
        ledger.drop(position, "lost")
    ledger.requeue(6)
    mark = ledger.mark()
    assert mark.live == ((1, 3), (5, 9))
    assert sorted(Ledger.restore(mark).queued) == [1, 2, 5, 6, 7, 8]


def test_reasons_with_numbers_in_them_are_counted_together_beyond_the_first_ones(make_sample):
    ledger = Ledger()
    for number in range(200):
        position = ledger.lease(number)
        ledger.finish(finished(position, [make_sample(), make_sample(1)]))
        ledger.drop(position, f"the spread is {number}")
    position = ledger.lease(200)
    ledger.finish(finished(position, [make_sample()]))
    ledger.drop(position, "stale")
    assert [*ledger.dropped][:2] == ["the spread is 0", "the spread is 1"]
    assert [*ledger.dropped][-2:] == [OTHER_REASONS, "stale"]
    assert len(ledger.dropped) == MOST_REASONS + 2
    assert (ledger.dropped[OTHER_REASONS], ledger.num_dropped) == (200 - MOST_REASONS, 201)
    assert (ledger.samples.dropped[OTHER_REASONS], ledger.samples.dropped["stale"]) == (2 * (200 - MOST_REASONS), 1)
