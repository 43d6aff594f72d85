from __future__ import annotations

import contextlib
import threading

from cosmos_core.replica.activity import Activity, Pulse


def test_what_is_done_within_something_else_is_seen_and_ends_with_it_or_an_error():
    activity = Activity()
    assert activity.pulse() == Pulse()
    seen = [activity.pulse()]
    with contextlib.suppress(KeyError), activity.doing("training step 3"):
        with activity.doing("waiting for the others", waits=True):
            seen.append(activity.pulse())
        seen.append(activity.pulse())
        activity.advance()
        seen.append(activity.pulse())
        _ = {}["missing"]
    seen.append(activity.pulse())
    doing = ["", "waiting for the others", "training step 3", "training step 3", ""]
    assert [each.doing for each in seen] == doing
    assert [each.waits for each in seen] == [False, True, False, False, False]
    assert len({each.progress for each in seen}) == len(seen), "every bit of work is another number"


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
