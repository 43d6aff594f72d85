from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_core.errors import TransportError
from cosmos_core.transport.outbox import Outbox

ALL = {"max_reports": 1000, "max_bytes": 1 << 20}


def filled(count: int, **bounds: int) -> Outbox:
    outbox = Outbox(**bounds)
    for number in range(1, count + 1):
        assert outbox.append(b"%d" % number) == number
    return outbox


def test_reports_are_numbered_from_one_and_sent_once():
    outbox = filled(3)
    assert outbox.peek(**ALL) == (1, (b"1", b"2", b"3"))
    assert outbox.peek(**ALL) == (1, (b"1", b"2", b"3"))  # it was not sent
    outbox.sent(3)
    assert outbox.peek(**ALL) is None
    outbox.append(b"4")
    assert outbox.peek(**ALL) == (4, (b"4",))


def test_acknowledgement_is_cumulative_and_of_what_was_made():
    outbox = filled(5)
    outbox.sent(5)
    with pytest.raises(TransportError, match="report 6 was acknowledged, but only 5 were made"):
        outbox.acknowledge(6)
    assert (outbox.acknowledged, len(outbox)) == (0, 5)
    assert outbox.acknowledge(3)
    assert (outbox.acknowledged, len(outbox), outbox.last) == (3, 2, 5)
    assert not outbox.acknowledge(2)
    assert not outbox.acknowledge(3)
    assert (outbox.acknowledged, len(outbox)) == (3, 2)


def test_what_is_not_acknowledged_is_sent_again_unless_it_arrived_after_all():
    outbox = filled(5)
    outbox.sent(5)
    outbox.acknowledge(2)
    outbox.go_back()
    assert outbox.peek(**ALL) == (3, (b"3", b"4", b"5"))
    outbox.acknowledge(4)
    assert outbox.peek(**ALL) == (5, (b"5",))


def test_batches_are_bounded_but_never_empty():
    outbox = filled(9)
    assert outbox.peek(max_reports=2, max_bytes=100) == (1, (b"1", b"2"))
    assert outbox.peek(max_reports=100, max_bytes=3) == (1, (b"1", b"2", b"3"))
    assert outbox.peek(max_reports=100, max_bytes=0) == (1, (b"1",))


def test_no_more_than_the_window_is_under_way():
    outbox = filled(10, window=4)
    outbox.sent(outbox.peek(**ALL)[0] + 3)
    assert outbox.peek(**ALL) is None
    outbox.acknowledge(1)
    assert outbox.peek(**ALL) == (5, (b"5",))


def test_a_full_outbox_says_so():
    outbox = filled(2, max_reports=2)
    with pytest.raises(TransportError, match=r"outbox is full: 2 reports .* since number 0 .*controller alive"):
        outbox.append(b"3")
    outbox.acknowledge(1)
    assert outbox.append(b"3") == 3
    small = Outbox(max_bytes=3)
    small.append(b"ab")
    with pytest.raises(TransportError, match="2 bytes"):
        small.append(b"cd")
    small.acknowledge(1)
    assert small.append(b"abc") == 2


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["append", "send", "lose", "go_back", "acknowledge"]), st.integers(1, 5))))
def test_a_receiver_that_takes_only_the_next_number_gets_each_report_once_in_order(actions):
    outbox = Outbox(window=4)
    made: list[bytes] = []
    received: list[bytes] = []
    for action, size in actions:
        if action == "append":
            made.append(b"%d" % len(made))
            outbox.append(made[-1])
        elif action in ("send", "lose") and (batch := outbox.peek(max_reports=size, max_bytes=100)):
            first, reports = batch
            outbox.sent(first + len(reports) - 1)
            if action == "send" and first <= len(received) + 1:
                received += reports[len(received) + 1 - first :]
        elif action == "go_back":
            outbox.go_back()
        elif action == "acknowledge":
            outbox.acknowledge(max(0, len(received) - size + 1))
    while len(received) < len(made):
        outbox.go_back()
        first, reports = outbox.peek(**ALL)
        received += reports[len(received) + 1 - first :]
        outbox.acknowledge(len(received))
    assert received == made
