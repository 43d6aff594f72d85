from __future__ import annotations

import threading
import time

from cosmos_core.rollout.version_lock import VersionLock


def test_an_evaluation_enters_only_at_exactly_its_version():
    version_lock = VersionLock()
    assert not version_lock.enter(0)
    version_lock.confirm(3)
    assert not version_lock.enter(2)
    assert not version_lock.enter(4)
    assert version_lock.enter(3)
    assert version_lock.loaded == 3


def test_a_change_waits_for_evaluations_and_keeps_new_ones_out():
    version_lock = VersionLock()
    version_lock.confirm(1)
    assert version_lock.enter(1)
    assert version_lock.enter(1)
    inside, let_go = threading.Event(), threading.Event()

    def change():
        with version_lock.changing(5) as may:
            assert may
            inside.set()
            let_go.wait(5)
            version_lock.confirm(2)

    thread = threading.Thread(target=change)
    thread.start()
    version_lock.leave()
    time.sleep(0.05)
    assert not inside.is_set()
    with version_lock.changing(1) as may:
        assert may, "an engine that slept loads again what is evaluated"
    version_lock.leave()
    assert inside.wait(5)
    assert not version_lock.enter(1)
    let_go.set()
    thread.join(5)
    assert not version_lock.enter(1)
    assert version_lock.enter(2)


def test_closing_lets_a_waiting_change_go_without_permission():
    version_lock = VersionLock()
    version_lock.confirm(1)
    version_lock.enter(1)
    threading.Timer(0.05, version_lock.close).start()
    with version_lock.changing(5) as may:
        assert not may
