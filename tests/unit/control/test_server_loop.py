from __future__ import annotations

import attrs
import pytest

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import (
    Commanded,
    JoinTimedOut,
    RegroupDue,
    ReplicaJoined,
    ReplicaLost,
    Reported,
    RolledBack,
    RunEnded,
    RunOpened,
)
from cosmos_core.control.server_loop import ServerLoop
from cosmos_core.errors import JournalError
from cosmos_core.transport.messages import (
    REQUEST,
    WIRE_VERSION,
    Acknowledged,
    Answer,
    Beat,
    Command,
    Directive,
    Hello,
    Inquire,
    Lost,
    Refused,
    Reports,
    Stop,
    Watch,
    Welcome,
)
from cosmos_core.transport.reports import REPORT, GenerationFailed, GenerationFormed, StepDone

CONTROL = ControlConfig(heartbeat_s=1.0, lost_after_s=10.0, join_timeout_s=100.0)
HELLO = Hello(
    wire=WIRE_VERSION,
    run_id="run",
    name="p0",
    role="policy",
    incarnation="one",
    host="host",
    pid=1,
    step=0,
    endpoints={"store": "s", "weights": "w"},
)


class Journal:
    def __init__(self):
        self.events = []
        self.committed = 0
        self.is_full = False

    def append(self, event):
        self.events.append(event)
        return len(self.events)

    def commit(self):
        if self.is_full:
            raise JournalError("disk full")
        self.committed = len(self.events)
        return self.committed

    def kinds(self):
        return [type(event) for event in self.events]


class Office:
    """A server loop, its journal and a clock."""

    def __init__(self, settings, facts=None):
        self.journal = Journal()
        self.now = 0.0
        self.server_loop = ServerLoop(core.begin(RunOpened(settings=settings)), self.journal, CONTROL, 0.0, facts)
        self.server_loop.state.term = 3

    def say(self, message, identity=b"id"):
        self.server_loop.take(identity, message, self.now)
        return self.said()

    def said(self):
        return [message for _, message in self.server_loop.commit(self.now)]

    def wait(self, seconds, step=1.0):
        end = self.now + seconds
        while self.now < end:
            self.now += step
            self.server_loop.failure_detector.look(self.now, lambda *_: True)


def reports(first, *given, incarnation="one", term=3):
    return Reports(
        name="p0",
        incarnation=incarnation,
        term=term,
        first=first,
        reports=tuple(each if isinstance(each, bytes) else REPORT.encode(each) for each in given),
    )


def beat(revision, incarnation="one", term=3):
    return Beat(name="p0", incarnation=incarnation, term=term, revision=revision, gauges={"speed": 2.0})


@pytest.fixture
def make_office(settings):
    return lambda: Office(settings(warmup=2, policy_replicas=1))


@pytest.fixture
def office(make_office):
    return make_office()


def test_a_hello_is_welcomed_once_durable_and_directed(make_office):
    office = make_office()
    said = office.say(HELLO)
    assert office.journal.kinds() == [ReplicaJoined]
    assert office.journal.committed == 1
    welcome, directive = said
    assert welcome == Welcome(term=3, acknowledged=0)
    assert (directive.term, directive.revision, directive.acknowledged) == (3, 1, 0)
    assert directive.policy.generation.members == ("p0",)
    assert directive.rollout is None

    office = make_office()
    office.say(HELLO)
    assert office.say(HELLO) == [Welcome(term=3, acknowledged=0)]
    assert office.journal.kinds() == [ReplicaJoined]


def test_questions_and_watchers_are_no_events(make_office):
    office = make_office()
    (told,) = office.say(Inquire(run_id="run"), identity=b"person")
    assert (told.step, told.keys, told.values, told.since) == (1, (), {}, {})
    (refused,) = office.say(Inquire(run_id="another"), identity=b"person")
    assert refused.reason == "this is run run, not another"
    assert office.journal.kinds() == []

    office = make_office()
    watch = Watch(run_id="run", after=4)
    office.say(watch, b"w")
    assert office.server_loop.watches == [(b"w", watch)]

    office = make_office()
    office.say(HELLO)
    office.say(beat(1))
    gauges = office.server_loop.gauges()
    assert gauges["p0"] == {"speed": 2.0}
    assert gauges["controller"]["events"] == 1


def test_strangers_and_those_made_of_something_else_are_refused(make_office, subtests, settings):
    office = make_office()
    for changes, reason in [({"wire": 99}, "wire version 99"), ({"run_id": "other"}, "it belongs to run other")]:
        with subtests.test(changes=changes):
            (answer,) = office.say(attrs.evolve(HELLO, **changes))
            assert isinstance(answer, Refused)
            assert reason in answer.reason
            assert answer.is_final
            assert office.journal.events == []

    office = Office(
        settings(warmup=2, policy_replicas=1), facts={"run.seed": "5", "plugin model hf": "cosmos-core 1.0"}
    )
    facts = {"run.seed": "6", "plugin model hf": "cosmos-core 1.0", "plugin engine vllm": "cosmos-engine-vllm 2"}
    (answer,) = office.say(attrs.evolve(HELLO, facts=facts))
    assert answer.reason == "its run.seed is 6, and 5 in this run; give it this run's folder and the same packages"
    assert office.journal.events == []
    assert isinstance(office.say(attrs.evolve(HELLO, facts=facts | {"run.seed": "5"}))[0], Welcome)

    office = make_office()
    office.server_loop.state.fail("x")
    (answer,) = office.say(HELLO)
    assert "the run is over (failed)" in answer.reason


def test_another_incarnation_takes_the_name_and_one_that_is_shut_out_is_told(make_office):
    office = make_office()
    office.say(HELLO)
    office.say(attrs.evolve(HELLO, incarnation="two"))
    assert office.journal.kinds() == [ReplicaJoined, ReplicaLost, ReplicaJoined]
    assert office.server_loop.state.replicas["p0"].incarnation == "two"
    for message in (HELLO, beat(1), reports(1, GenerationFormed(generation=1, step=0))):
        (answer,) = office.say(message)
        assert isinstance(answer, Refused)
        assert "it was given up" in answer.reason
        assert not answer.is_final
    assert len(office.journal.events) == 3

    office = make_office()
    office.say(HELLO)
    office.server_loop.shut_out(b"id", "its key was revoked")
    assert office.said() == [Refused(reason="its key was revoked", is_final=True)]
    assert office.journal.kinds() == [ReplicaJoined, ReplicaLost]


def test_reports_are_acknowledged_once_durable_and_count_once(make_office):
    office = make_office()
    office.say(HELLO)
    formed = GenerationFormed(generation=1, step=0)
    (directive,) = office.say(reports(1, formed))
    assert isinstance(directive, Directive)
    assert (directive.revision, directive.acknowledged) == (2, 1)
    assert directive.policy.train.step == 1
    assert office.say(reports(1, formed)) == [Acknowledged(term=3, acknowledged=1)]
    assert office.say(reports(1, formed, GenerationFailed(generation=0, reason="old"))) == [
        Acknowledged(term=3, acknowledged=2)
    ]
    assert [event.sequence for event in office.journal.events if isinstance(event, Reported)] == [1, 2]

    office = make_office()
    office.say(HELLO)
    assert office.say(reports(2, GenerationFormed(generation=1, step=0))) == []
    assert office.journal.kinds() == [ReplicaJoined]

    office = make_office()
    office.say(HELLO)
    said = office.say(reports(1, GenerationFailed(generation=0, reason="old"), b"rubbish"))
    assert isinstance(said[0], Refused)
    assert "report 2 cannot be read" in said[0].reason
    assert office.journal.kinds() == [ReplicaJoined, Reported, ReplicaLost]


def test_nothing_is_said_of_what_is_not_durable(office):
    office.journal.is_full = True
    office.server_loop.take(b"id", HELLO, 0.0)
    with pytest.raises(JournalError):
        office.server_loop.commit(0.0)


def test_a_replica_of_an_older_term_is_told_and_not_believed(make_office):
    office = make_office()
    office.say(HELLO)
    assert office.say(reports(1, GenerationFormed(generation=1, step=0), term=2)) == [
        Acknowledged(term=3, acknowledged=0)
    ]
    assert office.say(beat(7, term=2)) == [Acknowledged(term=3, acknowledged=0)]
    assert office.journal.kinds() == [ReplicaJoined]

    office = make_office()
    office.say(HELLO)
    state = office.server_loop.state
    state.term = 4
    server_loop = ServerLoop(state, office.journal, CONTROL, 0.0)
    assert server_loop.commit(0.0) == []
    server_loop.take(b"new", beat(1, term=3), 0.0)
    answers = server_loop.commit(0.0)
    assert answers[0] == (b"new", Acknowledged(term=4, acknowledged=0))
    server_loop.take(b"new", HELLO, 0.0)
    identity, welcome = server_loop.commit(0.0)[0]
    assert (identity, welcome) == (b"new", Welcome(term=4, acknowledged=0))
    assert office.journal.kinds() == [ReplicaJoined]


def test_who_was_told_of_this_term_by_another_controller_is_refused(settings, subtests):
    """The journal is an older copy, so its term comes again; nobody may take one controller for the other."""
    for message in [beat(7, term=4), beat(7, term=5), reports(3, b"", term=4)]:
        with subtests.test(message=type(message).__name__, term=message.term):
            office = Office(settings(warmup=2, policy_replicas=1))
            office.say(HELLO)
            state = office.server_loop.state
            state.term = 4
            office.server_loop = ServerLoop(state, office.journal, CONTROL, 0.0)
            (refused,) = office.say(message)
            assert f"was told of term {message.term} by another controller than this one of term 4" in refused.reason
            assert "start it again" in refused.reason
            assert not refused.is_final
            assert office.journal.kinds() == [ReplicaJoined, ReplicaLost]
            assert "it was given up" in office.say(HELLO)[0].reason


def test_directives_are_repeated_until_they_are_confirmed(office):
    office.say(HELLO)
    office.now = 0.9
    assert office.said() == []
    office.now = 1.1
    (again,) = office.said()
    assert again.revision == 1
    office.now = 2.2
    assert office.say(beat(1)) == []
    office.now = 4.0
    assert office.said() == []


def test_silence_is_noticed_and_a_pause_of_the_controller_is_none(make_office):
    office = make_office()
    office.say(HELLO)
    office.wait(9)
    office.say(beat(1))
    office.wait(10)
    assert ReplicaLost not in office.journal.kinds()
    office.wait(1)
    lost = office.journal.events[-1]
    assert lost == ReplicaLost(name="p0", incarnation="one", reason="silent for 10 s (control.lost_after_s)")

    office = make_office()
    office.say(HELLO)
    office.wait(60, step=60)
    assert ReplicaLost not in office.journal.kinds()
    office.wait(11)
    assert ReplicaLost in office.journal.kinds()


def test_replicas_are_waited_for_so_long(make_office, settings):
    office = make_office()
    office.say(HELLO)
    for _ in range(25):
        office.wait(4)
        office.say(beat(1))
    assert JoinTimedOut not in office.journal.kinds()
    office.wait(2)
    assert office.journal.events[-1] == JoinTimedOut(timeout_s=100.0)
    assert "1 of 1 rollout replicas" in office.server_loop.state.reason

    # One that comes and goes again and again brings the others no nearer.
    office = Office(settings(rollout_replicas=2))
    office.say(HELLO)
    for number in range(35):
        if number % 5 == 0:
            office.say(attrs.evolve(HELLO, name="r0", role="rollout", incarnation=f"r{number}"), b"r")
        office.wait(4)
        office.say(beat(1))
    assert office.journal.kinds().count(JoinTimedOut) == 1
    assert " of 2 rollout replicas" in office.server_loop.state.reason

    # Who is lost has the whole time to come again, however long another has not come.
    office = Office(settings(rollout_replicas=2, policy_replicas=1))
    office.say(HELLO)
    office.say(attrs.evolve(HELLO, name="r0", role="rollout", incarnation="a"), b"r0")
    others = ["r0"]
    for second in range(170):
        office.wait(1)
        if second < 60:
            office.say(beat(1))
        if second == 80:
            others.append("r1")
            office.say(attrs.evolve(HELLO, name="r1", role="rollout", incarnation="a"), b"r1")
        for name in others:
            office.say(attrs.evolve(beat(1), name=name, incarnation="a"), name.encode())
    assert office.journal.kinds().count(ReplicaLost) == 1
    assert JoinTimedOut not in office.journal.kinds()


def test_pools_that_share_gpus_and_groups_are_waited_for_so_long(make_office, settings):
    # One pool is made after the other, and who was killed comes again once the other pool sleeps.
    office = Office(settings(warmup=2, policy_replicas=1, takes_turns=True))
    office.wait(90)
    office.say(attrs.evolve(HELLO, name="r0", role="rollout", incarnation="two"), b"r")
    office.wait(90)
    assert office.journal.kinds().count(ReplicaLost) == 1
    office.say(HELLO)
    for _ in range(50):
        office.wait(4)
        office.say(beat(1))
    assert JoinTimedOut not in office.journal.kinds()
    office.wait(115)
    assert office.journal.events[-1] == JoinTimedOut(timeout_s=100.0)

    office = make_office()
    office.say(HELLO)
    office.say(reports(1, GenerationFailed(generation=1, reason="refused")))
    office.wait(0.4, step=0.2)
    assert RegroupDue not in office.journal.kinds()
    office.wait(0.8, step=0.2)
    assert office.journal.kinds().count(RegroupDue) == 1
    assert office.server_loop.state.generation_number == 2


def test_a_request_is_taken_once_from_this_run_only_and_only_if_it_is_one(make_office):
    office = make_office()
    office.say(HELLO)
    stop = REQUEST.encode(Stop())
    (answer,) = office.say(Command(run_id="other", ident="one", request=stop))
    assert isinstance(answer, Refused)
    for _ in range(2):
        answers = office.say(Command(run_id="run", ident="one", request=stop))
        assert Answer(ident="one") in answers
    assert office.journal.kinds().count(Commanded) == 1
    assert office.server_loop.state.is_stopping

    office = make_office()
    for request in (b"", b"nonsense", REPORT.encode(GenerationFailed(generation=1, reason="x"))):
        (answer,) = office.say(Command(run_id="run", ident="one", request=request))
        assert isinstance(answer, Answer)
        assert answer.refusal
    assert Commanded not in office.journal.kinds()


def test_a_process_that_the_launcher_misses_is_lost_once(office):
    office.say(HELLO)

    def told(incarnation, ident):
        lost = Lost(name="p0", incarnation=incarnation, reason="exit code 9")
        return office.say(Command(run_id="run", ident=ident, request=REQUEST.encode(lost)))

    assert told("another", "a") == [Answer(ident="a")]
    assert ReplicaLost not in office.journal.kinds()
    assert Answer(ident="b") in told("one", "b")
    assert Answer(ident="c") in told("one", "c")
    lost = [event for event in office.journal.events if isinstance(event, ReplicaLost)]
    assert lost == [ReplicaLost(name="p0", incarnation="one", reason="exit code 9")]
    assert Commanded not in office.journal.kinds()


class Sockets:
    """Keeps what is said, each time with the number of events that were durable; those in `gone` are not there."""

    def __init__(self, office):
        self.said, self.gone, self.office = [], set(), office

    def __call__(self, identity, message):
        self.said.append((message, self.office.journal.committed == len(self.office.journal.events)))
        return identity not in self.gone

    def turn(self, now):
        self.said.clear()
        self.office.now = now
        return self.office.server_loop.turn(now, self)

    @property
    def messages(self):
        return [message for message, _ in self.said]


@pytest.fixture
def sockets(office):
    office.server_loop.take(b"id", HELLO, 0.0)
    found = Sockets(office)
    found.turn(0.0)
    return found


def test_a_turn_says_nothing_that_is_not_durable_nor_at_the_end_of_the_run(office, sockets):
    """Not even to ask who is still there, when reports came in this very turn."""
    office.server_loop.state.outcome = "stopped"
    office.server_loop.take(b"id", reports(1, GenerationFormed(generation=1, step=0)), 0.0)
    assert not sockets.turn(1.0)
    farewells = [message for message in sockets.messages if message == Acknowledged(term=3, acknowledged=1)]
    assert farewells
    assert all(is_durable for _, is_durable in sockets.said)


def test_who_is_quiet_is_asked_only_once_what_others_said_is_durable(office, sockets):
    for now in (1.0, 2.0):
        sockets.turn(now)
    office.server_loop.take(b"other", attrs.evolve(HELLO, name="p1", incarnation="two"), 3.0)
    sockets.turn(3.0)
    assert Acknowledged(term=3, acknowledged=0) in [message for message, _ in sockets.said]
    assert all(is_durable for _, is_durable in sockets.said)


def test_a_turn_that_cannot_be_made_durable_says_nothing(office, sockets):
    office.server_loop.state.outcome = "stopped"
    office.server_loop.take(b"id", reports(1, GenerationFormed(generation=1, step=0)), 0.0)
    office.journal.is_full = True
    with pytest.raises(JournalError):
        sockets.turn(1.0)
    assert sockets.messages == []


def test_the_run_ends_once_nobody_is_connected_or_nobody_can_be_waited_for(office, sockets):
    office.server_loop.state.outcome = "stopped"
    assert not sockets.turn(1.0)
    sockets.gone.add(b"id")
    assert not sockets.turn(1.05)  # nobody is asked that often
    assert not office.server_loop.state.has_ended
    assert sockets.turn(1.2)
    assert office.journal.kinds()[-1] is RunEnded
    assert office.journal.committed == len(office.journal.events)


def test_one_that_never_leaves_does_not_keep_the_run(office, sockets, caplog):
    office.server_loop.state.outcome = "stopped"
    assert not sockets.turn(1.0)
    assert not sockets.turn(10.9)
    assert sockets.turn(11.1)
    assert "gave up waiting for p0 to end" in caplog.text


def test_weights_are_not_given_up_while_who_may_have_them_has_not_been_heard(settings):
    """The controller was started again; one policy replica was lost meanwhile, another has taken over its weights."""
    office = Office(settings(warmup=4, policy_replicas=1))
    office.say(HELLO)
    office.say(reports(1, GenerationFormed(generation=1, step=0)))
    state = office.server_loop.state
    done = {"attempt": 1, "generation": 1, "skipped": False, "metrics": {}}
    office.say(reports(2, *(StepDone(step=step, **done) for step in (1, 2, 3))))
    assert state.step == 3
    office.say(attrs.evolve(HELLO, name="p1", incarnation="other"), identity=b"other")
    state.term = 4
    server_loop = ServerLoop(state, office.journal, CONTROL, office.now)
    office.server_loop = server_loop
    server_loop.take(b"person", lost("p0", "one"), office.now)
    office.wait(5.0)
    assert RolledBack not in office.journal.kinds()
    formed = Reports(
        name="p1",
        incarnation="other",
        term=4,
        first=1,
        reports=(REPORT.encode(GenerationFormed(generation=1, step=3)),),
    )
    office.say(attrs.evolve(HELLO, name="p1", incarnation="other"), identity=b"other")
    server_loop.failure_detector.look(office.now, lambda *_: True)
    office.say(formed, identity=b"other")
    office.wait(2.0)
    assert RolledBack not in office.journal.kinds()


def test_weights_are_given_up_once_all_who_are_left_were_heard_or_lost(settings):
    office = Office(settings(warmup=4, policy_replicas=1))
    office.say(HELLO)
    state = office.server_loop.state
    state.step = 3
    state.replicas["p0"].step = 0
    state.term = 4
    office.server_loop = ServerLoop(state, office.journal, CONTROL, office.now)
    office.wait(5.0)
    assert RolledBack not in office.journal.kinds()
    office.say(beat(0))
    office.wait(2.0)
    assert office.journal.kinds().count(RolledBack) == 1


def lost(name, incarnation):
    request = REQUEST.encode(Lost(name=name, incarnation=incarnation, reason="ended"))
    return Command(ident=f"lost {incarnation}", run_id="run", request=request)
