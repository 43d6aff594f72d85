from __future__ import annotations

import threading

import pytest

from cosmos_core.replica.activity import Activity, Pulse, idle


def test_one_that_does_nothing_is_idle():
    assert Activity().pulse() == idle() == Pulse()


def test_what_is_done_within_something_else_is_seen_and_ends():
    activity = Activity()
    with activity.doing("training step 3"):
        with activity.doing("waiting for the others", waits=True):
            assert (activity.pulse().doing, activity.pulse().waits) == ("waiting for the others", True)
        assert (activity.pulse().doing, activity.pulse().waits) == ("training step 3", False)
    assert activity.pulse().doing == ""


def test_every_bit_of_work_is_another_number():
    activity = Activity()
    seen = [activity.pulse().progress]
    with activity.doing("training"):
        seen.append(activity.pulse().progress)
        activity.advance()
        seen.append(activity.pulse().progress)
    seen.append(activity.pulse().progress)
    assert len(set(seen)) == 4


def test_an_error_ends_what_was_done():
    activity = Activity()
    with pytest.raises(KeyError), activity.doing("training"):
        _ = {}["missing"]
    assert activity.pulse().doing == ""


def test_no_progress_is_lost_between_threads():
    activity = Activity()

    def work():
        for _ in range(1000):
            activity.advance()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert activity.pulse().progress == 4000
