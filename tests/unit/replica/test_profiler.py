from __future__ import annotations

import gzip
import json
import threading

import pytest
import torch

from cosmos_core.replica.profiler import Profiler, span
from cosmos_core.transport.directives import ProfileOrder


def names(path):
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def order(ident="one", ranks=(0,), first=2, steps=2):
    return ProfileOrder(ident=ident, first=first, steps=steps, ranks=ranks)


def work(profiler, *steps):
    for step in steps:
        with profiler.step(step), span(f"work {step}"):
            torch.ones(2) + 1


def test_the_steps_that_were_ordered_are_traced_once(tmp_path):
    told = []
    profiler = Profiler(tmp_path, "policy-0", told.append)
    work(profiler, 0)
    profiler.order = order()
    work(profiler, 1, 2, 3, 4)
    (done,) = told
    assert (done.ident, done.problem) == ("one", "")
    assert done.traces == ("profiles/step-2-one/policy-0-rank-0.json.gz",)
    found = names(tmp_path / done.traces[0])
    assert [name for name in found if name.startswith("work")] == ["work 2", "work 3"]
    assert "aten::add" in found
    assert [path.name for path in tmp_path.rglob("*.gz")] == ["policy-0-rank-0.json.gz"]
    work(profiler, 5)
    assert len(told) == 1


def test_attempts_that_fail_count_for_nothing(tmp_path):
    told = []
    profiler = Profiler(tmp_path, "p", told.append, untraced="its processes are not traced")
    profiler.order = order()
    for _ in range(2):
        with pytest.raises(ValueError, match="a peer left"), profiler.step(2), span("work 2"):
            raise ValueError("a peer left")
    with profiler.step(2), span("work 2"):
        profiler.repeat()
    assert not told
    work(profiler, 2, 3, 4)
    (done,) = told
    assert done.problem == "its processes are not traced"
    found = [name for name in names(tmp_path / done.traces[0]) if name.startswith("work")]
    assert found == ["work 2"] * 4 + ["work 3"]


def test_what_ends_before_tells_what_it_has(tmp_path):
    told = []
    profiler = Profiler(tmp_path, "p", told.append)
    profiler.finish()
    profiler.order = order()
    work(profiler, 2)
    profiler.finish()
    profiler.order = order("two", first=9)
    profiler.finish()
    assert [len(each.traces) for each in told] == [1, 0]
    assert all("before it had done so many steps" in each.problem for each in told)


def test_each_process_of_a_replica_takes_part_whether_it_traces_or_not(tmp_path):
    barrier, said, told = threading.Barrier(2), {}, []

    def process(rank):
        def exchange(words):
            said[rank] = words
            barrier.wait(20)
            return [said[0], said[1]]

        profiler = Profiler(tmp_path, "p", told.append if rank == 0 else lambda _: None, rank=rank, exchange=exchange)
        profiler.order = order(ranks=(1,), steps=1)
        work(profiler, 2)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [each.traces for each in told] == [("profiles/step-2-one/p-rank-1.json.gz",)]


@pytest.mark.parametrize("broken", ["start", "export_chrome_trace"])
def test_a_profiler_that_fails_costs_no_step(tmp_path, monkeypatch, broken):
    def fail(*_):
        raise RuntimeError("the device is busy")

    told = []
    monkeypatch.setattr(torch.profiler.profile, broken, fail)
    profiler = Profiler(tmp_path, "p", told.append)
    profiler.order = order()
    work(profiler, 2, 3)
    (done,) = told
    assert done.traces == ()
    assert "the device is busy" in done.problem
