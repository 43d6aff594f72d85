from __future__ import annotations

from cosmos_core.controller import observers as observers_module
from cosmos_core.controller.journal import Journal
from cosmos_core.controller.machine.events import EVENTS, ControllerStarted
from cosmos_core.controller.observers import Observers


class Post:
    def __init__(self):
        self.sent = []
        self.is_open = True

    def __call__(self, identity, notices):
        if self.is_open:
            self.sent.append((identity, notices))
        return self.is_open

    def numbers(self, identity):
        return [entry[0] for to, notices in self.sent if to == identity for entry in notices.entries]


def gauges():
    return {"controller": {"events": 1.0}}


def test_each_observer_gets_every_committed_entry_once_from_where_it_asked(tmp_path, run):
    post = Post()
    with Journal(tmp_path / "journal.sqlite") as journal:
        observers = Observers(journal, post)
        observers.watch(b"a", 0, now=0.0)
        journal.append(run().events[0])
        journal.append(ControllerStarted(term=1))
        observers.show(0.0, gauges)
        assert post.numbers(b"a") == []
        journal.commit()
        observers.show(0.1, gauges)
        observers.watch(b"b", 1, now=0.1)
        journal.append(ControllerStarted(term=2))
        journal.commit()
        observers.show(0.2, gauges)
        observers.show(0.3, gauges)
    assert post.numbers(b"a") == [1, 2, 3]
    assert post.numbers(b"b") == [2, 3]
    last = post.sent[-1][1].entries[-1]
    assert EVENTS.decode(last[2]) == ControllerStarted(term=2)


def test_what_could_not_be_sent_is_sent_later(tmp_path, run):
    post = Post()
    with Journal(tmp_path / "journal.sqlite") as journal:
        observers = Observers(journal, post)
        observers.watch(b"a", 0, now=0.0)
        for term in range(1200):
            journal.append(ControllerStarted(term=term))
        journal.commit()
        post.is_open = False
        observers.show(0.0, gauges)
        post.is_open = True
        observers.show(0.1, gauges)
    assert post.numbers(b"a") == list(range(1, 1201))


def test_gauges_come_twice_a_second_and_at_the_end_before_the_last_entry(tmp_path, run):
    post = Post()
    with Journal(tmp_path / "journal.sqlite") as journal:
        observers = Observers(journal, post)
        observers.watch(b"a", 0, now=1.0)
        for tenth in range(11):
            observers.show(1.0 + tenth / 10, gauges)
        assert len(post.sent) == 3
        journal.append(ControllerStarted(term=1))
        journal.commit()
        observers.show(2.1, gauges, is_last=True)
    assert post.sent[-2][1].gauges == gauges()
    assert [entry[0] for entry in post.sent[-1][1].entries] == [1]


def test_who_asks_no_more_is_forgotten(tmp_path):
    post = Post()
    with Journal(tmp_path / "journal.sqlite") as journal:
        observers = Observers(journal, post)
        observers.watch(b"a", 0, now=0.0)
        observers.show(31.0, gauges)
    assert post.sent == []


def test_a_late_observer_gets_a_long_journal_in_several_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(observers_module, "_MAX_BATCHES", 1)
    post = Post()
    with Journal(tmp_path / "journal.sqlite") as journal:
        observers = Observers(journal, post)
        observers.watch(b"a", 0, now=0.0)
        for term in range(2100):
            journal.append(ControllerStarted(term=term))
        journal.commit()
        sizes = []
        for turn in range(2):
            observers.show(0.1 * turn, gauges)
            sizes.append(len(post.numbers(b"a")))
        observers.show(0.3, gauges, is_last=True)
    assert sizes == [500, 1000]
    assert post.numbers(b"a") == list(range(1, 2101))
