import math

import pytest

from cosmos_core.control.live.event_feed import MOST_POINTS, EventFeed, Trace


def test_a_short_curve_has_every_point_that_is_a_number():
    trace = Trace("reward")
    for step in range(1, 10):
        trace.add(step, step / 2)
    assert trace.curve().points == tuple((step, step / 2) for step in range(1, 10))
    assert trace.curve().name == "reward"

    feed = EventFeed()
    for value in (None, math.nan, math.inf, -math.inf):
        feed._trace("loss", 1, value)
    assert feed.curves() == ()


def test_a_long_curve_stays_short_keeps_its_mean_and_ends_with_the_newest_step():
    trace = Trace("loss")
    for step in range(1, 10_001):
        trace.add(step, step % 2)
        assert len(trace.curve().points) <= MOST_POINTS
    points = trace.curve().points
    assert len(points) > MOST_POINTS / 4
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[-1][0] > 9_900
    assert sum(y for _, y in points) / len(points) == pytest.approx(0.5, abs=0.01)
