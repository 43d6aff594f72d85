from __future__ import annotations

import threading
import time

from cosmos_core.rollout.gate import VersionGate


def test_an_evaluation_enters_only_at_exactly_its_version():
    gate = VersionGate()
    assert not gate.enter(0)
    gate.confirm(3)
    assert not gate.enter(2)
    assert not gate.enter(4)
    assert gate.enter(3)
    assert gate.loaded == 3


def test_a_change_waits_for_evaluations_and_keeps_new_ones_out():
    gate = VersionGate()
    gate.confirm(1)
    assert gate.enter(1)
    assert gate.enter(1)
    inside, let_go = threading.Event(), threading.Event()

    def change():
        with gate.changing() as may:
            assert may
            inside.set()
            let_go.wait(5)
            gate.confirm(2)

    thread = threading.Thread(target=change)
    thread.start()
    gate.leave()
    time.sleep(0.05)
    assert not inside.is_set()
    gate.leave()
    assert inside.wait(5)
    assert not gate.enter(1)
    let_go.set()
    thread.join(5)
    assert not gate.enter(1)
    assert gate.enter(2)


def test_closing_lets_a_waiting_change_go_without_permission():
    gate = VersionGate()
    gate.confirm(1)
    gate.enter(1)
    threading.Timer(0.05, gate.close).start()
    with gate.changing() as may:
        assert not may
