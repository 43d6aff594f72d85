from __future__ import annotations

import math

import attrs
import pytest

from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.replica.activity import Activity
from cosmos_core.replica.session import HELLO_S, LONGEST_RESEND_S, RESEND_S, SILENCE_S, Session
from cosmos_core.transport.messages import Acknowledged, Beat, Directive, Hello, Notices, Refused, Reports, Welcome
from cosmos_core.transport.outbox import Outbox


@pytest.fixture
def session(hello):
    return Session(hello, heartbeat_s=1.0, gauges=lambda: {"load": 1.0}, outbox=Outbox())


def said(session: Session, now: float) -> list[Hello | Beat | Reports]:
    """All that the session says now, sent with success."""
    messages = []
    while (message := session.next_message(now)) is not None:
        session.sent(message, now)
        messages.append(message)
    return messages


def welcomed(session: Session, term: int = 1, acknowledged: int = 0, now: float = 0.0) -> None:
    said(session, now)
    session.receive(Welcome(term=term, acknowledged=acknowledged), now)
    said(session, now)


def test_hello_is_said_each_second_until_welcome(session, hello):
    assert session.next_message(0.0) is session.next_message(0.0) is hello, "what could not be sent is still due"
    assert said(session, 0.0) == [hello]
    assert said(session, HELLO_S - 0.01) == []
    assert session.deadline() == HELLO_S
    assert said(session, HELLO_S) == [hello]
    session.receive(Welcome(term=1, acknowledged=0), 1.5)
    assert session.is_welcome
    assert [type(message) for message in said(session, 2.5)] == [Beat]
    session.receive(Welcome(term=1, acknowledged=0), 2.6)  # once more
    assert said(session, 2.6) == []
    session.set_step(12)
    session.receive(Acknowledged(term=2, acknowledged=0), 2.7)
    (again,) = said(session, 2.7)
    assert again == attrs.evolve(hello, step=12)


def test_reports_wait_for_the_welcome(session):
    session.outbox.append(b"one")
    assert [type(message) for message in said(session, 0.0)] == [Hello]
    session.receive(Welcome(term=3, acknowledged=0), 0.1)
    beat, reports = said(session, 0.1)
    assert (reports.term, reports.first, reports.reports) == (3, 1, (b"one",))
    assert beat == Beat(name="rollout-0", incarnation="first", term=3, revision=0, gauges={"load": 1.0})


def test_reports_are_resent_until_acknowledged(session):
    welcomed(session)
    session.outbox.append(b"one")
    session.outbox.append(b"two")
    assert len(said(session, 0.1)) == 1
    assert said(session, 0.1 + RESEND_S - 0.01) == []
    (again,) = said(session, 0.1 + RESEND_S)
    assert (again.first, again.reports) == (1, (b"one", b"two"))
    session.receive(Acknowledged(term=1, acknowledged=1), 0.7)
    (again,) = [message for message in said(session, 0.7 + RESEND_S) if isinstance(message, Reports)]
    assert (again.first, again.reports) == (2, (b"two",))
    session.receive(Directive(term=1, revision=1, acknowledged=2), 1.3)
    assert not [message for message in said(session, 9.0) if isinstance(message, Reports)]


def batches(session: Session, now: float) -> list[tuple[int, int]]:
    """First number and length of the reports that the session says now."""
    return [(message.first, len(message.reports)) for message in said(session, now) if isinstance(message, Reports)]


def test_a_loss_is_repaired_even_while_new_reports_keep_coming(session):
    welcomed(session)
    found = []
    for tick in range(10):
        session.outbox.append(b"x")
        found += batches(session, tick * 0.1)
    assert found == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (1, 6)]
    session.receive(Acknowledged(term=1, acknowledged=6), 0.95)
    assert batches(session, 0.95) == [(7, 4)]


def test_while_the_controller_is_busy_ever_fewer_reports_are_repeated(session):
    welcomed(session)
    for _ in range(3):
        session.outbox.append(bytes(600_000))
    assert batches(session, 0.0) == [(1, 1), (2, 1), (3, 1)]
    repeats = [(tick * 0.5, batch) for tick in range(1, 100) for batch in batches(session, tick * 0.5)]
    assert [when for when, _ in repeats] == [0.5, 1.5, 3.5, 7.5, 15.5, 25.5, 35.5, 45.5]
    assert {batch for _, batch in repeats} == {(1, 1)}
    assert LONGEST_RESEND_S == 10.0
    # Another controller is told all at once.
    session.receive(Welcome(term=2, acknowledged=0), 50.1)
    assert batches(session, 50.1) == [(1, 1), (2, 1), (3, 1)]
    assert batches(session, 50.1 + RESEND_S) == [(1, 1)]


def test_what_was_said_before_is_repeated_batch_by_batch_once_the_controller_answers(session):
    welcomed(session)
    for _ in range(4):
        session.outbox.append(bytes(600_000))
    said(session, 0.0)
    assert batches(session, RESEND_S) == [(1, 1)]
    session.receive(Acknowledged(term=1, acknowledged=2), 1.0)
    assert batches(session, 1.0) == [(3, 1)]
    session.outbox.append(b"new")
    assert batches(session, 1.1) == []
    session.receive(Acknowledged(term=1, acknowledged=2), 1.2)
    assert batches(session, 1.0 + RESEND_S) == [(3, 1)]
    session.receive(Acknowledged(term=1, acknowledged=4), 1.6)
    assert batches(session, 1.6) == [(5, 1)]
    session.outbox.append(b"newer")
    assert batches(session, 1.7) == [(6, 1)]
    assert batches(session, 1.6 + RESEND_S) == [(5, 2)]


def test_the_newest_directive_wins(session):
    welcomed(session)
    session.receive(Directive(term=1, revision=1, acknowledged=0), 0.1)
    assert session.deadline() == pytest.approx(0.6), "it is acknowledged within half a heartbeat"
    for revision in (2, 1, 4, 3, 4):
        session.receive(Directive(term=1, revision=revision, acknowledged=0), 0.0)
    assert session.directive.revision == 4
    (beat,) = [message for message in said(session, 1.0) if isinstance(message, Beat)]
    assert beat.revision == 4


def test_a_new_term_restarts_numbering_asks_for_hello_and_resends(session, hello):
    welcomed(session)
    session.receive(Directive(term=1, revision=40, acknowledged=0), 0.0)
    session.outbox.append(b"one")
    session.outbox.append(b"two")
    said(session, 0.0)
    session.receive(Directive(term=2, revision=1, acknowledged=0), 0.1)
    assert (session.directive.term, session.directive.revision) == (2, 1)
    assert not session.is_welcome
    assert said(session, 0.1) == [hello]
    session.receive(Welcome(term=2, acknowledged=1), 0.2)
    beat, reports = said(session, 0.2)
    assert (beat.term, beat.revision) == (2, 1)
    assert (reports.term, reports.first, reports.reports) == (2, 2, (b"two",))


def test_an_old_term_changes_nothing(session):
    welcomed(session, term=5)
    session.outbox.append(b"one")
    said(session, 0.0)
    before = session.deadline()
    session.receive(Acknowledged(term=4, acknowledged=1), 0.0)
    session.receive(Directive(term=4, revision=99, acknowledged=1), 0.0)
    session.receive(Welcome(term=4, acknowledged=1), 0.0)
    session.receive(Welcome(term=0, acknowledged=1), 0.0)
    assert (session.directive, session.outbox.acknowledged, session.deadline()) == (None, 0, before)
    assert session.is_welcome
    # Acknowledgements of a new one count only after its welcome.
    session.receive(Acknowledged(term=6, acknowledged=1), 0.0)
    assert session.outbox.acknowledged == 0
    session.receive(Welcome(term=6, acknowledged=0), 0.0)
    assert [message.first for message in said(session, 0.0) if isinstance(message, Reports)] == [1]


def test_a_controller_that_forgot_durable_reports_is_left(session):
    welcomed(session)
    session.outbox.append(b"one")
    said(session, 0.0)
    session.receive(Acknowledged(term=1, acknowledged=1), 0.1)
    session.receive(Acknowledged(term=2, acknowledged=0), 0.1)
    session.receive(Welcome(term=2, acknowledged=0), 0.2)
    assert "term 2 knows reports up to 0, but 1 were acknowledged: its journal lost its end" in session.refusal
    assert not session.is_final
    assert said(session, 99.0) == []


def test_another_process_of_the_same_incarnation_is_an_error_and_changes_nothing(session):
    welcomed(session)
    for message in (
        Directive(term=1, revision=7, acknowledged=1),
        Acknowledged(term=2, acknowledged=1),
        Welcome(term=2, acknowledged=1),
    ):
        said = r"acknowledges report 1, but only 0 were made: another process had this incarnation \(first"
        with pytest.raises(ReplicaError, match=said):
            session.receive(message, 0.0)
    with pytest.raises(TransportError, match="not for replicas"):
        session.receive(Notices(entries=(), last=0, gauges={}), 0.0)
    assert session.directive is None
    assert session.is_welcome


def test_a_refused_replica_says_nothing_more(session):
    welcomed(session)
    session.outbox.append(b"one")
    session.receive(Refused(reason="another took over"), 0.0)
    assert session.refusal == "another took over"
    assert said(session, 99.0) == []
    assert session.deadline() == math.inf


def test_silence_is_answered_with_hello_once_each_time(session, hello):
    welcomed(session)
    assert hello in said(session, SILENCE_S)
    assert hello not in said(session, SILENCE_S + 5)
    session.receive(Welcome(term=1, acknowledged=0), SILENCE_S + 6)
    assert hello not in said(session, 2 * SILENCE_S + 5)
    assert hello in said(session, 2 * SILENCE_S + 6)


def test_a_beat_tells_what_is_done_and_whether_it_gets_on(hello):
    activity = Activity()
    session = Session(hello, heartbeat_s=1.0, gauges=dict, outbox=Outbox(), take_pulse=activity.pulse)
    said(session, 0.0)
    session.receive(Welcome(term=3, acknowledged=0), 0.0)
    with activity.doing("training step 3"):
        (beat,) = said(session, 0.0)
        assert (beat.doing, beat.waits) == ("training step 3", False)
        activity.advance()
        (again,) = said(session, 1.0)
    assert again.progress > beat.progress
    (idle,) = said(session, 2.0)
    assert idle.doing == ""
