"""What is known of requests as time goes on."""

from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_core.types import SampleStatus
from cosmos_service_reward_service.capacity import Capacity
from cosmos_service_reward_service.ledger import Ledger

RESULTS = {"a": [Outcome(value=1.0, status=SampleStatus.OK)]}


def ledger(**fields):
    return Ledger(**{"keep_s": 10.0, "keep": 100, "forget_s": 50.0, **fields})


def opened(tickets, ticket, *, key="", now=0.0):
    return tickets.open(ticket, digest="d", key=key, about={}, now=now)


def state(tickets, ticket, now):
    return tickets.find(ticket, now)[0]


def test_a_request_is_pending_then_done_then_expired_then_unknown():
    tickets = ledger()
    assert state(tickets, "t", 0.0) == "unknown"
    entry = opened(tickets, "t", now=1.0)
    assert (state(tickets, "t", 999.0), tickets.num_pending) == ("pending", 1)
    tickets.finish(entry, RESULTS, 1000.0)
    assert (entry.results, entry.seconds, entry.finished.is_set()) == (RESULTS, 999.0, True)
    assert tickets.find("t", 1009.9) == ("done", entry)
    assert state(tickets, "t", 1010.0) == "expired"
    assert state(tickets, "t", 1059.9) == "expired"
    assert state(tickets, "t", 1060.0) == "unknown"
    assert (tickets.num_pending, tickets.num_done) == (0, 0)


def test_a_key_is_known_until_its_result_expires():
    tickets = ledger()
    entry = opened(tickets, "t", key="k")
    assert tickets.known("k", 5.0) is entry
    tickets.finish(entry, RESULTS, 5.0)
    assert tickets.known("k", 14.9) is entry
    assert tickets.known("k", 15.0) is None
    assert tickets.known("", 0.0) is None
    opened(tickets, "u", key="k", now=15.0)
    assert tickets.known("k", 15.0).ticket == "u"


def test_of_too_many_results_the_oldest_expire():
    tickets = ledger(keep=2)
    for index in range(4):
        tickets.finish(opened(tickets, str(index)), RESULTS, float(index))
    assert [state(tickets, str(index), 4.0) for index in range(4)] == ["expired", "expired", "done", "done"]


def test_capacity_counts_requests_and_bytes():
    capacity = Capacity(2, 100)
    assert capacity.take(60)
    assert not capacity.take(41)
    assert capacity.take(40)
    capacity.give(60)
    assert capacity.take(0)
    assert not capacity.take(0)
    assert (capacity.num_requests, capacity.held_bytes) == (2, 40)
