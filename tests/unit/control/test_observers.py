from __future__ import annotations

from cosmos_core.control.journal import Journal
from cosmos_core.control.machine.events import EVENTS, ControllerStarted
from cosmos_core.control.server import Observers


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
        observers = Observers(journal, post, lambda: 0)
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
        observers = Observers(journal, post, lambda: 0)
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
        observers = Observers(journal, post, lambda: 0)
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
        observers = Observers(journal, post, lambda: 0)
        observers.watch(b"a", 0, now=0.0)
        observers.show(31.0, gauges)
    assert post.sent == []


def filled(journal, count):
    for term in range(count):
        journal.append(ControllerStarted(term=term))
    journal.commit()


def test_a_late_observer_gets_a_long_journal_as_it_takes_it(tmp_path, monkeypatch):
    monkeypatch.setattr("cosmos_core.control.server._MAX_BATCHES", 2)
    post, sizes = Post(), []
    with Journal(tmp_path / "journal.sqlite") as journal:
        observers = Observers(journal, post, lambda: 0)
        filled(journal, 2100)
        for turn, after in enumerate((0, 0, 400, 1000, 1900)):
            observers.watch(b"a", after, now=0.1 * turn)
            observers.show(0.1 * turn, gauges, is_last=turn == 1)
            sizes.append(len(post.numbers(b"a")))
    assert sizes == [1000, 1000, 1400, 2000, 2100]
    assert post.numbers(b"a") == list(range(1, 2101))


def test_what_got_lost_is_sent_again(tmp_path):
    post = Post()
    with Journal(tmp_path / "journal.sqlite") as journal:
        observers = Observers(journal, post, lambda: 0)
        filled(journal, 30)
        observers.watch(b"a", 0, now=0.0)
        observers.show(0.0, gauges)
        observers.watch(b"a", 10, now=0.1, again=True)
        observers.show(0.1, gauges)
    assert post.numbers(b"a") == [*range(1, 31), *range(11, 31)]


def test_a_slow_reader_gets_nothing_twice(tmp_path):
    post, has = Post(), 0
    with Journal(tmp_path / "journal.sqlite") as journal:
        observers = Observers(journal, post, lambda: 0)
        filled(journal, 20_000)
        for tenth in range(400):
            if tenth % 10 == 0:
                observers.watch(b"a", has, now=tenth / 10)
            observers.show(tenth / 10, gauges)
            has = min(has + 100, len(post.numbers(b"a")))
    assert post.numbers(b"a") == list(range(1, 20_001))


def test_whoever_follows_a_replica_finds_room_and_others_are_to_try_again(tmp_path):
    post = Post()
    with Journal(tmp_path / "journal.sqlite") as journal:
        observers = Observers(journal, post, lambda: 3)
        for number in range(68):
            observers.watch(b"%d" % number, 0, now=0.0)
        assert len(observers.identities) == 67
        ((whom, refused),) = post.sent
        assert (whom, refused.is_final) == (b"67", False)
        observers.forget(b"0")
        observers.watch(b"67", 0, now=1.0)
    assert b"67" in observers.identities
